"The Triton kernels against float64: in the interpreter where there is no GPU, and on it where there is one."
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st

from paged import Paged, around, check
from ref import drained, greedy, poison

pytest.importorskip('triton')
from minivllm import LLM, SamplingParams
from minivllm.kernels import gpu
from minivllm.model import ModelConfig, Transformer, reference_attend

DEVICE = 'cuda' if torch.cuda.is_available() else 'cpu'
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16]*(DEVICE == 'cuda')     # bf16 dots are garbage in the interpreter
here = Path(__file__).parent
pytestmark = pytest.mark.filterwarnings('ignore::RuntimeWarning')                   # the interpreter's, for empty pieces


@pytest.fixture(scope='module')
def backend(): return gpu.TritonAttention(DEVICE, torch.float32)


@pytest.mark.parametrize('block_size', (1, 4, 16))
@pytest.mark.parametrize('window', (None, 1, 5))
def test_lengths_around_a_block(backend, block_size, window):
    lens = around(block_size)
    check(backend, lens, block_size=block_size, window=window, hd=16, device=DEVICE)
    check(backend, lens, takes=[(n + 1)//2 for n in lens], block_size=block_size, window=window, hd=16, device=DEVICE)


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('hd', (64, 80, 96, 128, 256))
@pytest.mark.parametrize('group', (1, 3, 4, 8))
def test_heads(backend, group, hd, dtype):
    kw = dict(nq=2*group, nkv=2, hd=hd, dtype=dtype, device=DEVICE)
    check(backend, [19, 3], **kw)
    check(backend, [19, 3], takes=[7, 3], **kw)


@pytest.mark.parametrize('splits', (2, 8))
@pytest.mark.parametrize('window', (None, 20))
def test_pieces_are_merged(backend, monkeypatch, splits, window):
    "Histories of less than one tile, of several, and of fewer tiles than pieces"
    monkeypatch.setattr(gpu, 'num_splits', lambda *_: splits)
    monkeypatch.setattr(gpu, 'tile_size', lambda *_: 16)
    check(backend, [1, 15, 16, 17, 70, 128], hd=16, nq=3, nkv=1, window=window, device=DEVICE)


@pytest.mark.parametrize('window', (None, 1, 31, 32, 100))
def test_prompts_of_many_tiles(backend, monkeypatch, window):
    "Chunks behind long histories, tiles of few keys: unmasked tiles, the diagonal, tiles before the window of a row"
    monkeypatch.setattr(gpu, 'tile_size', lambda *_: 16)
    check(backend, [70, 33, 1, 90], takes=[70, 1, 1, 40], hd=16, nq=3, nkv=1, window=window, device=DEVICE)


def test_PC15_rows_of_a_batch(backend):
    "Every row of a batch of unequal, non-multiple lengths is what it is alone: no neighbor, no NaN behind its end"
    for takes in (None, [5, 18, 3, 33]): check(backend, [5, 18, 3, 33], takes=takes, block_size=4, hd=16, device=DEVICE)


def test_a_pool_of_more_than_two_to_the_31_numbers(backend):
    "Rows beyond 2**31 numbers are found; the memory is only touched where there is something"
    nkv, hd, bs, n = 8, 64, 16, 5
    blocks = 2**31 // (nkv*hd*bs) + 2
    cache = torch.empty(blocks, bs, nkv, hd, dtype=torch.float16, device=DEVICE)
    case = Paged([n], nq=nkv, nkv=nkv, hd=hd, dtype=torch.float16, device=DEVICE)
    case.everything.slot_mapping += (blocks - 1 - case.tables[0][0])*bs
    case.metadata.block_tables.fill_(blocks - 1)
    backend.store_kv(case.k, case.k, cache, cache, case.everything.slot_mapping)
    assert torch.equal(cache[-1, :n], case.k)
    case.v = case.k
    case.is_prefill, case.takes = True, [1]
    for attend in (backend.decode, backend.prefill):
        out = attend(case.q, cache, cache, case.metadata, case.scale)
        assert (out.double() - case.expected()).abs().max() < 4e-3


lens = st.lists(st.one_of(st.integers(1, 40), st.sampled_from([63, 64, 65, 127, 128, 129])), min_size=1, max_size=3)

@settings(max_examples=20, deadline=None)
@given(lens=lens, data=st.data(), hd=st.sampled_from([16, 20, 64, 80]), group=st.sampled_from([1, 3, 4, 8]), block_size=st.sampled_from([1, 2, 8, 32]),
       window=st.sampled_from([None, None, 1, 7, 64]), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 999))
def test_random_shapes(lens, data, hd, group, block_size, window, dtype, seed):
    takes = data.draw(st.one_of(st.none(), st.tuples(*(st.integers(1, n) for n in lens)).map(list)), label='takes')
    check(gpu.TritonAttention(DEVICE, dtype), lens, takes=takes, hd=hd, nq=group, nkv=1, block_size=block_size, window=window, dtype=dtype, device=DEVICE, seed=seed)


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('size', (48, 576, 1024))
def test_rms_norm(dtype, size):
    x, stream, weight = (torch.randn(s, device=DEVICE).to(dtype) for s in ((5, size), (5, size), (size,)))
    norm = lambda x: x.double()*torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-5)*weight.double()
    tol = dict(rtol={torch.float32: 1e-5}.get(dtype, 2**-7), atol=1e-3 if dtype != torch.float32 else 1e-5)
    torch.testing.assert_close(gpu.rms_norm(x, weight, 1e-5).double(), norm(x), **tol)
    total = x + stream
    out = gpu.rms_norm(x, weight, 1e-5, stream)
    torch.testing.assert_close(out.double(), norm(total), **tol)
    torch.testing.assert_close(stream, total, rtol=0, atol=0)


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('hd,norm', ((16, False), (80, True), (128, True)))
def test_rotate_heads(dtype, hd, norm):
    T, nq, nkv = 3, 6, 2
    qkv, weights = torch.randn(T, (nq + 2*nkv)*hd, device=DEVICE).to(dtype), [torch.randn(hd, device=DEVICE).to(dtype) for _ in range(2)]
    angle = torch.randn(T, hd//2, device=DEVICE)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    q, k, v = qkv.double().unflatten(-1, (-1, hd)).split([nq, nkv, nkv], 1)
    if norm: q, k = (x*torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)*w.double() for x, w in zip((q, k), weights))
    a, b = torch.cat([q, k], 1).chunk(2, -1)
    c, s = cos.double()[:, None], sin.double()[:, None]
    want = torch.cat([torch.cat([a*c - b*s, b*c + a*s], -1), v], 1).flatten(1)
    gpu.rotate_heads(qkv, (nq, nkv), cos, sin, *(weights if norm else ()), eps=1e-6)
    torch.testing.assert_close(qkv.double(), want, rtol=1e-5 if dtype == torch.float32 else 2**-7, atol=1e-5 if dtype == torch.float32 else 2e-3)


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('size', (7, 1024, 1536))
def test_silu_mul(dtype, size):
    x = 5*torch.randn(3, 2*size, device=DEVICE).to(dtype)
    x[0, :2] = torch.tensor([80., -80.])
    want = F.silu(x[:, :size].double())*x[:, size:].double()
    torch.testing.assert_close(gpu.silu_mul(x).double(), want, rtol=1e-5 if dtype == torch.float32 else 2**-7, atol=1e-5 if dtype == torch.float32 else 1e-3)


@pytest.mark.parametrize('family,kw', (('llama', {}), ('qwen2', dict(tie_word_embeddings=True)), ('qwen3', dict(hidden_act='gelu')), ('mistral', dict(sliding_window=4))))
def test_fused_model(family, kw):
    config = ModelConfig.from_dict(dict(model_type=family, vocab_size=60, hidden_size=48, intermediate_size=72, num_hidden_layers=3, num_attention_heads=4,
                                        num_key_value_heads=2, head_dim=20) | kw)
    model, g = Transformer(config), torch.Generator().manual_seed(0)
    for p in model.parameters(): p.copy_(torch.randn(p.shape, generator=g)*(.2 if p.ndim > 1 else 1.))
    model = model.to(DEVICE)
    run = lambda: model(torch.arange(9, device=DEVICE), torch.arange(9, device=DEVICE), reference_attend(config))
    plain = run()
    gpu.fuse(model)
    torch.testing.assert_close(run(), plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize('family,kw', (('llama', {}), ('qwen3', {}), ('mistral', dict(sliding_window=6))))
def test_engine_gives_the_references_tokens(tmp_path, family, kw):
    "Chunked prefill, a prefix hit, preemption for want of blocks, all blocks poisoned when handed out; all through Triton"
    from tiny import tiny_llama
    folder = str(tiny_llama(tmp_path, family, **kw))
    reference = LLM(folder, dtype='float32', device='cpu', attention_backend='torch', num_blocks=8).model
    llm = poison(LLM(folder, dtype='float32', attention_backend='triton', block_size=4, num_blocks=11, max_num_batched_tokens=12, enforce_eager=True))
    assert isinstance(llm.model, gpu.FusedTransformer)
    shared = [(7*i) % 250 + 3 for i in range(13)]
    prompts, params = [shared, [5, 9, 200], shared[:9] + [77]], SamplingParams(temperature=0, max_tokens=7, ignore_eos=True)
    want = [greedy(reference, p, 7) for p in prompts]
    first = llm.generate(prompts, params, use_tqdm=False)
    again = llm.generate(prompts[:1], params, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in first + again] == want + want[:1]
    assert again[0].num_cached_tokens and any(o.metrics.num_preemptions for o in first)
    drained(llm)


def test_refusals(monkeypatch):
    with monkeypatch.context() as m:
        m.setattr(torch.cuda, 'is_available', lambda: False)
        with pytest.raises(ValueError, match='needs a GPU'): gpu.TritonAttention('cuda')
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'current_device', lambda: 0)
    with pytest.raises(ValueError, match='not the current one'): gpu.TritonAttention('cuda:7')
    code = "from minivllm.attention import get_backend; get_backend('triton', 'cpu')"
    done = subprocess.run([sys.executable, '-c', code], env=os.environ | dict(TRITON_INTERPRET='0'), capture_output=True, text=True)
    assert 'needs a GPU' in done.stderr.splitlines()[-1]


def test_everything_compiles_for_nvidia_gpus_without_one(tmp_path):
    "What the wrappers would launch, for each head dimension and type, through Triton's compiler to machine code; it fits into shared memory and does not spill"
    env = {k: v for k, v in os.environ.items() if k != 'TRITON_INTERPRET'} | dict(TRITON_CACHE_DIR=str(tmp_path))
    done = subprocess.run([sys.executable, str(here/'compile_kernels.py'), '90', 'few'], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads(done.stdout.splitlines()[-1])
    assert {'decode_kernel', 'merge_kernel', 'prefill_kernel', 'store_kernel', 'rms_norm_kernel', 'rotate_kernel', 'silu_mul_kernel'} == {r['kernel'] for r in rows}
    for r in rows: assert r['shared'] <= 101_376, r       # 99 KB: what GPUs from 2020 on have, the small ones included
    assert all(r['wgmma'] for r in rows if r['kernel'] == 'prefill_kernel' and r['dtype'] == 'bfloat16'), 'Hopper\'s matrix instructions'


def test_nothing_of_a_gpu_is_imported_without_one(tiny):
    "A machine that has none of the packages: the engine starts and answers, CUDA is not touched"
    code = f'''import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("triton", "flash_attn", "flash_attn_interface"): raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
import torch
from minivllm import LLM, SamplingParams
LLM({str(tiny)!r}, device="cpu", num_blocks=16).generate([[5, 6, 7]], SamplingParams(max_tokens=3), use_tqdm=False)
assert not torch.cuda.is_initialized()
bad = [m for m in sys.modules if m.split(".")[0] in ("triton", "flash_attn") or m in ("minivllm.kernels.gpu", "minivllm.kernels.flash", "minivllm.cuda_graphs")]
assert not bad, bad
from minivllm.attention import get_backend
for name in ("triton", "flash"):
    try: get_backend(name, "cpu", torch.bfloat16)
    except ValueError as e: assert name in str(e) and "does not load" in str(e), e
    else: raise AssertionError(name)
'''
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
