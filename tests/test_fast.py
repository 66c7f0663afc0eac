"""The fast path on the CPU: its products against PyTorch, its bits against themselves, its quantized weights against exact ones."""
import os
import random
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minivllm import LLM, SamplingParams
from minivllm.kernels import linear as kernels
from minivllm.kernels.fast import FastBlock, agreement, optimize
from minivllm.kernels.linear import PackedLinear, PackedNorm, RowTiles
from minivllm.kernels.quantized import load_quantized, q4, q8, quantize
from minivllm.model import Transformer, reference_attend
from minivllm.weights import load_model, resolve_model
from ref import drained, poison

SLOW = settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


# ---- products

def plain(weight, bias, x, norm, gate, residual):
    x = x.float()
    if norm is not None: x = F.rms_norm(x, (x.shape[1],), norm, 1e-5)
    if gate: x = F.silu(x[:, :x.shape[1]//2]) * x[:, x.shape[1]//2:]
    return F.linear(x, weight.float(), bias) + (0 if residual is None else residual)


@SLOW
@given(n_in=st.integers(1, 200), n_out=st.integers(1, 130), rows=st.integers(1, 70), dtype=st.sampled_from([torch.float32, torch.bfloat16]),
       norm=st.booleans(), gate=st.booleans(), bias=st.booleans(), add=st.booleans(), seed=st.integers(0, 99))
def test_products_are_right(n_in, n_out, rows, dtype, norm, gate, bias, add, seed):
    g = torch.Generator().manual_seed(seed)
    rand = lambda *shape: torch.randn(*shape, generator=g)
    weight = (rand(n_out, n_in) * n_in**-.5).to(dtype)
    x, b, w, r = rand(rows, n_in*(2 if gate else 1)), rand(n_out) if bias else None, 1 + .1*rand(n_in) if norm and not gate else None, rand(rows, n_out) if add else None
    got = PackedLinear.pack(weight, b)(x, norm=None if w is None else PackedNorm(w, 1e-5), gate=gate, add=None if r is None else r.clone())
    tol = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(got, plain(weight, b, x, w, gate, r), rtol=tol, atol=tol)


@pytest.mark.parametrize('kind', [kernels.fp32, kernels.wide, kernels.kind_for(torch.bfloat16), q4, q8], ids=lambda k: k.name)
def test_a_row_does_not_notice_its_batch(kind):
    g = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(90, 576, generator=g) * .05).to(kind.dtype or torch.float32), torch.randn(300, 576, generator=g)
    layer, before = PackedLinear(kind.pack(weight), kind, 576, 90), torch.get_num_threads()
    whole = layer(x)
    assert kernels.is_sound(layer)
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for n in (1, 2, 3, 4, 5, 8, 11, 12, 13, 16, 17, 31, 32, 33, 100, 255, 256, 257):
                assert torch.equal(layer(x[300-n:]), whole[300-n:]), (threads, n)
    finally: torch.set_num_threads(before)


def test_nan_stays_visible():
    "A row that holds NaN or infinity gives no innocent numbers, and its neighbors do not see it"
    for kind in (kernels.fp32, kernels.kind_for(torch.bfloat16), q4, q8):
        layer = PackedLinear(kind.pack(torch.randn(64, 64).to(kind.dtype or torch.float32)), kind, 64, 64)
        x = torch.randn(3, 64)
        good, x[1, 5] = layer(x), torch.nan
        bad = layer(x)
        assert bad[1].isnan().all() and torch.equal(bad[[0, 2]], good[[0, 2]])


# ---- bits of a whole engine

def logits_of(llm, requests, **steps):
    "Logits of every sampled position, `{(request, position): row}`, and the engine left empty"
    seen, sample = {}, llm.sampler
    def spy(logits, seqs):
        for row, s in zip(logits, seqs): seen[int(s.request_id), s.num_output_tokens] = row.clone()
        return sample(logits, seqs)
    llm.sampler, step = spy, 0
    try:
        while llm.has_unfinished_requests() or any(r['arrive'] >= step for r in requests):
            for i, r in enumerate(requests):
                if r['arrive'] == step: llm.add_request(r['prompt'], SamplingParams(temperature=0, max_tokens=r['n'], ignore_eos=True), str(i))
            llm.step()
            step += 1
    finally: llm.sampler = sample
    drained(llm)
    return seen


MODES = dict(fp32=dict(dtype='float32'), bf16=dict(dtype='bfloat16'), int8=dict(dtype='float32', quantization='int8'), int4=dict(dtype='bfloat16', quantization='int4'))
PREFIXES = [[random.Random(i).randrange(3, 290) for _ in range(24)] for i in range(2)]


@st.composite
def requests(draw):
    prompt = draw(st.sampled_from([[], *PREFIXES]))[:draw(st.integers(0, 24))] + draw(st.lists(st.integers(3, 290), min_size=1, max_size=20))
    return dict(prompt=prompt, n=draw(st.integers(1, 8)), arrive=draw(st.integers(0, 8)))


@st.composite
def engines(draw):
    block_size = draw(st.sampled_from([1, 4, 8]))
    return dict(block_size=block_size, num_blocks=draw(st.integers(-(-60 // block_size), 200 // block_size)), max_num_batched_tokens=draw(st.sampled_from([1, 3, 8, 17, 256])),
                max_num_seqs=draw(st.integers(1, 8)), enable_prefix_caching=draw(st.booleans()), policy=draw(st.sampled_from(['balanced', 'prefill_first', 'decode_first'])))


@pytest.fixture(scope='module', params=MODES)
def world(request, tiny):
    how = MODES[request.param]
    with LLM(str(tiny), block_size=16, num_blocks=8, enable_prefix_caching=False, **how) as single: yield str(tiny), how, single, {}


@SLOW
@given(config=engines(), workload=st.lists(requests(), min_size=1, max_size=8))
def test_batch_invariance(world, config, workload):
    "Logits are bit for bit those of the request alone: whatever shares the batch, for any chunk, block and pool, after preemption, with prefix hits"
    folder, how, single, alone = world
    llm = poison(LLM(folder, **config, **how))
    got = logits_of(llm, workload)
    assert len(got) == sum(r['n'] for r in workload)
    for i, r in enumerate(workload):
        key = tuple(r['prompt']), r['n']
        if key not in alone: alone[key] = logits_of(single, [r | dict(arrive=0)])
        for k in range(r['n']): assert torch.equal(got[i, k], alone[key][0, k]), (i, k)


@pytest.mark.parametrize('how', [dict(), dict(dtype='bfloat16'), dict(dtype='float32')], ids=['gguf', 'bf16', 'fp32'])
def test_batch_invariance_of_the_demo_model(how):
    "The same, on real weights: six requests with a common beginning, chunked, crowded out and resumed, against each alone"
    rng = random.Random(1)
    shared = [rng.randrange(100, 40000) for _ in range(20)]
    workload = [dict(prompt=(shared if i % 2 else []) + [rng.randrange(100, 40000) for _ in range(rng.randrange(1, 40))], n=5, arrive=i // 2) for i in range(6)]
    with LLM(block_size=4, num_blocks=40, max_num_batched_tokens=24, **how) as llm:
        together = logits_of(llm, workload)
    with LLM(block_size=16, num_blocks=16, enable_prefix_caching=False, **how) as llm:
        for i, r in enumerate(workload):
            alone = logits_of(llm, [r | dict(arrive=0)])
            for k in range(r['n']): assert torch.equal(together[i, k], alone[0, k]), (i, k)


def test_threads_do_not_change_bits(tiny):
    rows, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2):
            with LLM(str(tiny), dtype='bfloat16', num_blocks=32, threads=threads) as llm:
                assert llm.threads == threads == torch.get_num_threads()
                rows.append(logits_of(llm, [dict(prompt=PREFIXES[0], n=3, arrive=0)]))
    finally: torch.set_num_threads(before)
    assert all(torch.equal(rows[0][k], rows[1][k]) for k in rows[0])


def test_default_threads(tiny, monkeypatch):
    from minivllm.engine import default_threads, physical_cores
    before = torch.get_num_threads()
    monkeypatch.setenv('OMP_NUM_THREADS', '1')
    with LLM(str(tiny), num_blocks=32) as llm: assert llm.threads == 1
    monkeypatch.delenv('OMP_NUM_THREADS')
    assert default_threads() == physical_cores() <= os.cpu_count()
    torch.set_num_threads(before)


# ---- fast parts against the reference

def test_fast_is_the_reference(tiny):
    "fp32: within 1e-5 of the logits' size, both blocks in two calls and one by one"
    files = resolve_model(str(tiny))
    model, ids = load_model(files, 'float32'), torch.tensor(PREFIXES[0] + PREFIXES[1])
    fast = optimize(load_model(files, 'float32'))
    assert all(isinstance(l, FastBlock) and l.record is not None for l in fast.layers)
    attend, at = reference_attend(files.config), torch.arange(len(ids))
    want = model.compute_logits(model(ids, at, attend))
    for _ in range(2):
        got = fast.compute_logits(fast(ids, at, attend))
        assert (got - want).abs().max() < 1e-5*want.abs().max()
        for l in fast.layers: l.record = None


def test_unsound_products_fall_back(tiny, monkeypatch, capsys):
    "A machine whose kernels fail the check at load runs on row tiles, says so, and keeps the promise"
    monkeypatch.setattr(kernels, '_sound', {})
    monkeypatch.setattr(kernels.is_sound, '__code__', (lambda layer: False).__code__)
    workload = [dict(prompt=p, n=4, arrive=i) for i, p in enumerate(PREFIXES)]
    with LLM(str(tiny), dtype='float32', num_blocks=32, max_num_batched_tokens=7) as llm:
        assert isinstance(llm.model.layers[0].o_proj, RowTiles) and 'fail their check' in capsys.readouterr().err
        together = logits_of(llm, workload)
        for i, r in enumerate(workload):
            alone = logits_of(llm, [r | dict(arrive=0)])
            for k in range(4): torch.testing.assert_close(together[i, k], alone[0, k], rtol=1e-4, atol=1e-4)


def test_nothing_is_held_twice():
    "Tied embeddings, packed or quantized: one table; no plain weight is left"
    for how, most in ((dict(dtype='bfloat16'), 260), (dict(), 100)):
        with LLM(num_blocks=16, **how) as llm:
            assert llm.model.embed_tokens is llm.model.lm_head and not list(llm.model.parameters())
            assert sum(m.packed.nbytes for m in set(llm.model.modules()) if isinstance(m, PackedLinear)) < most * 2**20


# ---- quantized weights

def test_which_quantization(tiny, demo_files):
    with pytest.raises(ValueError, match='needs a .gguf file'): LLM(str(tiny), quantization='gguf', num_blocks=8)
    with pytest.raises(ValueError, match="use one of gguf, int8, int4, none"): LLM(str(tiny), quantization='fp8', num_blocks=8)
    with pytest.raises(ValueError, match="attention_backend='cpu'"): LLM(str(tiny), quantization='int8', attention_backend='torch', num_blocks=8)
    for how, kind in ((dict(), '4-bit blocks'), (dict(quantization='none'), None), (dict(dtype='float32'), 'fp32'), (dict(dtype='float32', quantization='gguf'), '4-bit blocks')):
        with LLM(num_blocks=8, **how) as llm: assert kind in (None, llm.model.layers[0].o_proj.kind.name)


@pytest.mark.parametrize('kind', ['Q4_0', 'Q4_1', 'Q8_0', 'Q6_K', 'F16'])
def test_gguf_types_stay_or_become_blocks(tmp_path, kind):
    from tiny import tiny_gguf, tiny_model
    model = tiny_model(hidden_size=256, intermediate_size=256, head_dim=64) if kind == 'Q6_K' else tiny_model()
    files = resolve_model(str(tiny_gguf(tmp_path/'m.gguf', model, kind)))
    exact, kept = load_model(files, 'float32'), load_quantized(files, 'float32')
    product = getattr(kept.layers[0].self_attn.qkv_proj, 'kind', None)
    assert product is {'Q4_0': q4, 'Q4_1': q4, 'Q8_0': q8, 'Q6_K': q8, 'F16': None}[kind]
    if product: torch.testing.assert_close(kept.embed_tokens.rows(torch.arange(9)), exact.embed_tokens.rows(torch.arange(9)), rtol=.02, atol=.1 if kind == 'Q6_K' else 0)
    ids = torch.tensor(PREFIXES[0])
    scale = exact.compute_logits(exact(ids, torch.arange(24), reference_attend(files.config))).std().item()
    error, _ = agreement(exact, optimize(kept), ids, reference_attend(files.config))
    assert error < .05 * scale


def test_qkv_parts_of_unlike_types(tmp_path):
    "A fused layer whose parts are stored differently becomes 8-bit blocks"
    import minivllm.kernels.quantized as quantized
    gguf = pytest.importorskip('gguf')
    parts = []
    for kind in ('Q4_1', 'Q8_0'):
        raw = gguf.quants.quantize(torch.randn(48, 64).numpy(), gguf.GGMLQuantizationType[kind])
        parts.append((torch.from_numpy(raw), kind))
    layer = quantized.quantized_linear(parts, 64)
    assert layer.kind is q8 and layer.n_out == 96


def test_quantized_demo_model_is_close_to_fp32(demo_files):
    "Teacher-forced over 200 tokens: the logits' error is a small part of their spread, and most argmaxes agree"
    from minivllm.tokens import Tokenizer
    ids = torch.tensor(Tokenizer.from_folder(demo_files.tokenizer_folder).encode(open(os.path.join(os.path.dirname(__file__), '..', 'LICENSE')).read())[:200])
    attend = reference_attend(demo_files.config)
    exact = load_model(demo_files, 'float32')
    for make, error, same in ((lambda: load_quantized(demo_files), .5, .93), (lambda: quantize(load_model(demo_files, 'float32'), 8), .5, .93), (lambda: quantize(load_model(demo_files, 'float32'), 4), .5, .93)):
        got = agreement(exact, optimize(make()), ids, attend)
        assert got[0] < error and got[1] > same, got


@pytest.mark.parametrize('given, spins', [({}, '10000'), (dict(GOMP_SPINCOUNT='7'), '7'), (dict(OMP_WAIT_POLICY='active'), None)])
def test_threads_wait_politely_unless_told_otherwise(given, spins):
    env = {k: v for k, v in os.environ.items() if k not in ('GOMP_SPINCOUNT', 'OMP_WAIT_POLICY')} | given
    out = subprocess.run([sys.executable, '-c', "import minivllm, os, sys; print(os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules)"], env=env, capture_output=True, text=True, check=True)
    assert out.stdout.split() == [str(spins), 'False']
