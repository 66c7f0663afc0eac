"Attention backends against a float64 reference, and the CPU kernels against themselves, bit by bit."
import os
import subprocess
import sys
import threading
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings, strategies as st

from minivllm.attention import build_metadata, get_backend
from minivllm.kv_cache import KVCache

BACKENDS = 'torch', 'cpu'
DTYPES = torch.float32, torch.bfloat16


@dataclass
class Case:
    "Some requests: packed q, k, v of all their tokens"
    lens: list
    nq: int = 6
    nkv: int = 2
    hd: int = 16
    window: int | None = None
    dtype: torch.dtype = torch.float32
    seed: int = 0

    def __post_init__(self):
        g = torch.Generator().manual_seed(self.seed)
        self.q, self.k, self.v = (torch.randn(sum(self.lens), h, self.hd, generator=g).to(self.dtype) for h in (self.nq, self.nkv, self.nkv))
        self.begin = [sum(self.lens[:i]) for i in range(len(self.lens))]
        self.scale = self.hd**-.5

    def rows(self, i): return slice(self.begin[i], self.begin[i] + self.lens[i])

    def expected(self):
        "Dense attention in float64, one request after the other"
        out = torch.empty(self.q.shape, dtype=torch.float64)
        for i, n in enumerate(self.lens):
            q, k, v = (x[self.rows(i)].double() for x in (self.q, self.k, self.v))
            k, v = (x.repeat_interleave(self.nq // self.nkv, 1) for x in (k, v))
            ago = torch.arange(n)[:, None] - torch.arange(n)
            seen = (ago >= 0) & (ago < (self.window or n))
            scores = (torch.einsum('thd,shd->hts', q, k) * self.scale).masked_fill(~seen, -torch.inf)
            out[self.rows(i)] = torch.einsum('hts,shd->thd', scores.softmax(-1), v)
        return out

    def run(self, backend, block_size=16, chunks=None, groups=None, shuffle=0, decode_singles=True):
        """All tokens through `backend`, in steps. `chunks[i]`: the sizes of request i's chunks, repeated to its end;
        `groups`: lists of requests that share their steps (default: all together). Unused slots are NaN throughout."""
        chunks, groups = chunks or [[n] for n in self.lens], groups or [list(range(len(self.lens)))]
        need = [-(-n // block_size) for n in self.lens]
        pool = KVCache(2, sum(need) + 3, block_size, self.nkv, self.hd, self.dtype)
        pool.poison(range(pool.num_blocks))
        free = torch.randperm(pool.num_blocks, generator=torch.Generator().manual_seed(shuffle)).tolist()
        tables, layer, out = [[free.pop() for _ in range(n)] for n in need], pool.layer(1), torch.full_like(self.q, torch.nan)
        for group in groups:
            done, turn = dict.fromkeys(group, 0), 0
            while who := [i for i in group if done[i] < self.lens[i]]:
                ends = [min(done[i] + chunks[i][turn % len(chunks[i])], self.lens[i]) for i in who]
                takes, turn = [e - done[i] for i, e in zip(who, ends)], turn + 1
                single = decode_singles and max(takes) == 1
                m = build_metadata([tables[i] for i in who], ends, takes, block_size, is_prefill=not single)
                at = torch.cat([torch.arange(self.begin[i] + done[i], self.begin[i] + e) for i, e in zip(who, ends)])
                backend.store_kv(self.k[at], self.v[at], *layer, m.slot_mapping)
                out[at] = (backend.decode if single else backend.prefill)(self.q[at], *layer, m, self.scale, self.window)
                done.update(zip(who, ends))
        used = torch.tensor([t[p // block_size] * block_size + p % block_size for t, n in zip(tables, self.lens) for p in range(n)])
        unused = torch.ones(pool.num_blocks * block_size, dtype=torch.bool)
        unused[used] = False
        assert all(c.flatten(0, 1)[unused].isnan().all() for c in layer), 'a slot outside the block tables was written'
        assert pool.data[:, 0].isnan().all(), 'another layer was written'
        return out


@pytest.fixture(params=BACKENDS)
def backend(request): return get_backend(request.param)


@pytest.fixture(scope='module')
def cpu(): return get_backend('cpu')


def close(out, case): torch.testing.assert_close(out.double(), case.expected(), rtol=1e-5 if case.dtype == torch.float32 else 2**-8, atol=1e-5)


@pytest.mark.parametrize('block_size', (1, 4, 16))
@pytest.mark.parametrize('window', (None, 1, 5))
def test_lengths_around_a_block(backend, block_size, window):
    lens = sorted({1, max(1, block_size - 1), block_size, block_size + 1, 3*block_size + 2})
    case = Case(lens, window=window)
    close(case.run(backend, block_size), case)


@pytest.mark.parametrize('group', (1, 3, 4, 8))
@pytest.mark.parametrize('hd', (8, 16, 24, 64, 80, 128))
def test_heads(backend, group, hd):
    case = Case([70, 1, 19], nq=2*group, nkv=2, hd=hd)
    close(case.run(backend, 16, [[33], [1], [19]]), case)


@pytest.mark.parametrize('window', (None, 1, 63, 64, 255, 256, 300, 2000))
def test_long_histories_and_windows(backend, window):
    case = Case([64, 65, 256, 257, 515, 600], nq=3, nkv=1, window=window)
    close(case.run(backend, 16, [[200]]*6), case)


@pytest.mark.parametrize('dtype', DTYPES)
def test_long_decode(backend, dtype):
    "Histories of one, two and three pieces, each decoded at once"
    case, pool, tables = Case([255, 256, 257, 700], dtype=dtype), KVCache(1, 100, 16, 2, 16, dtype), []
    pool.poison(range(100))
    free = torch.randperm(100, generator=torch.Generator().manual_seed(1)).tolist()
    tables = [[free.pop() for _ in range(-(-n // 16))] for n in case.lens]
    m = build_metadata(tables, case.lens, case.lens, 16)
    backend.store_kv(case.k, case.v, *pool.layer(0), m.slot_mapping)
    last = torch.tensor([b + n - 1 for b, n in zip(case.begin, case.lens)])
    out = backend.decode(case.q[last], *pool.layer(0), build_metadata(tables, case.lens, [1]*4, 16, is_prefill=False), case.scale)
    torch.testing.assert_close(out.double(), case.expected()[last], rtol=1e-5 if dtype == torch.float32 else 2**-8, atol=1e-5)


def test_PC15_rows_of_a_batch(backend):
    "Every row of a batch of unequal, non-multiple lengths is what it is alone"
    case = Case([5, 18, 3, 33], seed=3)
    chunks = [[3, 1, 1], [7, 1, 1, 4], [1], [16, 2]]
    together, alone = case.run(backend, 4, chunks), case.run(backend, 4, chunks, groups=[[0], [1], [2], [3]])
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)
    close(together, case)


cases = st.builds(Case, lens=st.lists(st.one_of(st.integers(1, 40), st.sampled_from([63, 64, 65, 256, 257, 300])), min_size=1, max_size=4),
                  nkv=st.just(1), nq=st.sampled_from([1, 3, 4, 8]), hd=st.sampled_from([16, 64, 80]), window=st.sampled_from([None, None, 1, 7, 100, 260]),
                  dtype=st.sampled_from(DTYPES), seed=st.integers(0, 1000))


@settings(max_examples=30, deadline=None)
@given(case=cases, block_size=st.sampled_from([1, 3, 16, 32]), data=st.data())
def test_cpu_bits_depend_on_nothing_else(cpu, case, block_size, data):
    "Chunks, company, block size and the order of blocks leave the bits alone, and the values are right"
    n = len(case.lens)
    base = case.run(cpu, 16)
    close(base, case)
    chunks = data.draw(st.lists(st.lists(st.integers(1, 300), min_size=1, max_size=3), min_size=n, max_size=n), label='chunks')
    order = data.draw(st.permutations(range(n)), label='order')
    cut = data.draw(st.integers(0, n), label='cut')
    groups = [g for g in (order[:cut], order[cut:]) if g]
    assert torch.equal(case.run(cpu, block_size, chunks, groups, shuffle=data.draw(st.integers(0, 99), label='shuffle')), base)


@pytest.mark.parametrize('dtype', DTYPES)
def test_cpu_decode_is_prefill(cpu, dtype):
    "Token by token through decode, token by token through prefill, and the whole prompt at once: the same bits"
    case = Case([270, 3], nq=3, nkv=1, dtype=dtype)
    whole = case.run(cpu)
    assert torch.equal(case.run(cpu, 16, [[1], [1]]), whole)
    assert torch.equal(case.run(cpu, 16, [[1], [1]], decode_singles=False), whole)


@settings(max_examples=30, deadline=None)
@given(case=cases, block_size=st.sampled_from([1, 3, 16]), chunk=st.integers(1, 100))
def test_cpu_equals_torch(cpu, case, block_size, chunk):
    out, ref = (case.run(b, block_size, [[chunk]]*len(case.lens)) for b in (cpu, get_backend('torch')))
    torch.testing.assert_close(out, ref, rtol=1e-5 if case.dtype == torch.float32 else 2**-7, atol=1e-5)


@pytest.mark.parametrize('threads', (1, 2, 5))
def test_cpu_threads(cpu, threads):
    case, before = Case([1100, 300], nq=9, nkv=3, hd=64), torch.get_num_threads()
    base = case.run(cpu)
    try:
        torch.set_num_threads(threads)
        assert torch.equal(case.run(cpu), base)
        assert torch.equal(case.run(cpu, 16, [[1090, 1, 1], [290, 1, 1]]), base)
    finally: torch.set_num_threads(before)


def test_cpu_compiled_once_and_numba_threads(cpu, tmp_path):
    """The first process says that it compiles, the second finds the result on disk and is silent; in both, the stand-in for
    machines whose PyTorch does not offer its threads gives the same bits"""
    code = """import sys, torch
from minivllm.kernels.cpu import CPUAttention, load_kernels
from test_attention import Case
own, case = CPUAttention(), Case([700], nq=9, nkv=3, hd=64)
print('ready', file=sys.stderr)
own.kernels = load_kernels(own_threads=True)
assert own.kernels.lock
torch.save(case.run(own, 16, [[690, 1]]), sys.argv[1])"""
    env = {**os.environ, 'NUMBA_CACHE_DIR': str(tmp_path), 'PYTHONPATH': os.pathsep.join([os.path.dirname(__file__), *sys.path])}
    for compiles in (1, 0):
        done = subprocess.run([sys.executable, '-c', code, str(tmp_path/'out.pt')], check=True, env=env, stderr=subprocess.PIPE, text=True)
        assert done.stderr.split('ready')[0].count('compiling the CPU kernels') == compiles, done.stderr
        assert torch.equal(torch.load(tmp_path/'out.pt'), Case([700], nq=9, nkv=3, hd=64).run(cpu))


def test_cpu_from_two_threads(cpu):
    "Two Python threads may run the kernels at the same time"
    case = Case([600, 90], nq=9, nkv=3, hd=64)
    base, equal = case.run(cpu), []
    def go(): equal.append(all(torch.equal(case.run(cpu, 16, [[590, 1], [30]]), base) for _ in range(5)))
    threads = [threading.Thread(target=go) for _ in range(3)]
    for t in threads: t.start()
    for t in threads: t.join()
    assert equal == [True]*3


def test_cpu_takes_slices(cpu):
    "q, k and v may be slices of one fused projection"
    case = Case([50], nq=4, nkv=2)
    fused = torch.cat([x.flatten(1) for x in (case.q, case.k, case.v)], 1)
    q, k, v = (x.unflatten(1, (-1, 16)) for x in fused.split([64, 32, 32], 1))
    pool = KVCache(1, 4, 16, 2, 16)
    m = build_metadata([[2, 0, 3, 1]], [50], [50], 16)
    cpu.store_kv(k, v, *pool.layer(0), m.slot_mapping)
    assert torch.equal(cpu.prefill(q, *pool.layer(0), m, case.scale), case.run(cpu))
    transposed = q.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(cpu.prefill(transposed, *pool.layer(0), m, case.scale), case.run(cpu))


def test_cpu_mixed_types(cpu):
    "fp32 queries over a bf16 cache, and the other way round"
    for q_dtype, kv_dtype in (DTYPES, DTYPES[::-1]):
        case, pool, m = Case([40]), KVCache(1, 3, 16, 2, 16, kv_dtype), build_metadata([[2, 0, 1]], [40], [40], 16)
        for b in (cpu, get_backend('torch')): b.store_kv(case.k, case.v, *pool.layer(0), m.slot_mapping)
        a, b = (b.prefill(case.q.to(q_dtype), *pool.layer(0), m, case.scale) for b in (cpu, get_backend('torch')))
        assert a.dtype == q_dtype
        torch.testing.assert_close(a, b, rtol=1e-5 if q_dtype == torch.float32 else 2**-7, atol=1e-5)


def test_cpu_nan_and_inf_stay_in_their_rows(cpu):
    "A request whose numbers have overflowed does not touch its neighbours"
    case = Case([40, 40])
    base = case.run(cpu)
    case.k[10], case.v[20] = torch.nan, torch.inf
    out = case.run(cpu)
    assert torch.equal(out[case.rows(1)], base[case.rows(1)])
    assert out[10:40].isnan().any(-1).all()


def test_cpu_large_scores(cpu):
    "Scores that would overflow an exponential without the running maximum"
    case = Case([90])
    case.q, case.k = case.q*100, case.k*100
    torch.testing.assert_close(case.run(cpu).double(), case.expected(), rtol=1e-2, atol=1e-2)


def test_cpu_refuses_what_does_not_fit(cpu):
    pool, q = KVCache(1, 4, 4, 2, 16), torch.randn(1, 6, 16)
    def meta(): return build_metadata([[1, 2]], [8], [1], 4, is_prefill=False)
    def decode(m, q=q): return cpu.decode(q, *pool.layer(0), m, .25)
    m = meta(); m.block_tables[0, 1] = 4
    with pytest.raises(IndexError, match='outside the 4'): decode(m)
    m.block_tables[0, 1] = -1
    with pytest.raises(IndexError, match='outside the 4'): decode(m)
    m = meta(); m.context_lens[0] = 9
    with pytest.raises(ValueError, match='do not fit'): decode(m)
    m = meta(); m.context_lens[0] = 0
    with pytest.raises(ValueError, match='do not fit'): decode(m)
    m = meta(); m.context_lens = m.context_lens.long()
    with pytest.raises(ValueError, match='context_lens must be'): decode(m)
    with pytest.raises(ValueError, match='do not fit'): decode(meta(), torch.randn(2, 6, 16))
    with pytest.raises(ValueError, match='does not fit K/V'): decode(meta(), torch.randn(1, 5, 16))
    with pytest.raises(ValueError, match='does not fit K/V'): decode(meta(), torch.randn(1, 6, 16).half())
    for slot in (-1, 16):
        with pytest.raises(IndexError, match='slot_mapping'): cpu.store_kv(q[:, :2], q[:, :2], *pool.layer(0), torch.tensor([slot]))
    with pytest.raises(ValueError, match='k and v must be'): cpu.store_kv(q[:, :3], q[:, :3], *pool.layer(0), torch.tensor([0]))


def test_numba_is_imported_only_when_asked_for():
    code = "import sys; from minivllm.attention import get_backend; get_backend('torch'); assert 'numba' not in sys.modules; get_backend(); assert 'numba' in sys.modules"
    subprocess.run([sys.executable, '-c', code], check=True)


def test_kernels_without_a_cache_folder(monkeypatch):
    "No folder can be written: compile for this process"
    from minivllm.kernels.cpu import _cached
    calls = []
    def decorator(cache=False):
        def wrap(f):
            calls.append(cache)
            if cache: raise RuntimeError('cannot cache function: no locator available')
            return f
        return wrap
    assert _cached(decorator, abs) is abs and calls == [True, False]
