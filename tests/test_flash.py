"The flash-attn backend: its wiring against a stand-in with the package's own signatures and limits, and the package itself where it is."
import sys
from types import ModuleType

import pytest
import torch

from minivllm import LLM, SamplingParams, attention
from minivllm.attention import best_backend, get_backend
from paged import Paged, around


def attend(q, k, v, scale, window):
    T, S, group = len(q), len(k), q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1).float() for x in (k, v))
    ago = torch.arange(S - T, S)[:, None] - torch.arange(S)                  # causal means aligned to the last key, as in 2.1 and later
    seen = (ago >= 0) & ((ago <= window[0]) | (window[0] < 0))
    return torch.einsum('hts,shd->thd', (torch.einsum('thd,shd->hts', q.float(), k)*scale).masked_fill(~seen, -torch.inf).softmax(-1), v).to(q.dtype)


def check_tensors(q, k_cache, v_cache, block_table, lengths, causal, window_size):
    "What csrc/flash_attn/flash_api.cpp refuses, and what we count on"
    assert q.dtype == k_cache.dtype == v_cache.dtype and q.dtype in (torch.float16, torch.bfloat16), 'FlashAttention only supports fp16 and bf16 data type'
    assert all(x.stride(-1) == 1 for x in (q, k_cache, v_cache, block_table)), 'Input tensor must have contiguous last dimension'
    assert k_cache.shape[1] % 256 == 0, 'Paged KV cache block size must be divisible by 256'
    assert block_table.dtype == torch.int32 and all(x.dtype == torch.int32 and x.is_contiguous() for x in lengths)
    assert q.shape[-1] == k_cache.shape[-1] <= 256 and q.shape[-1] % 8 == 0 and q.shape[-2] % k_cache.shape[-2] == 0
    assert causal and (window_size == (-1, -1) or window_size[0] >= 0 and window_size[1] == 0)


def paged(cache, table, n): return cache[table[:-(-n // cache.shape[1])].long()].flatten(0, 1)[:n]


def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1),
                           softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False, block_table=None):
    check_tensors(q, k, v, block_table, (cu_seqlens_q, cu_seqlens_k), causal, window_size)
    assert dropout_p == softcap == 0 and alibi_slopes is None and softmax_scale is not None and q.ndim == 3
    ends_q, lens_k = cu_seqlens_q.tolist(), cu_seqlens_k.diff().tolist()
    assert ends_q[-1] == len(q) and max_seqlen_q == cu_seqlens_q.diff().max() and max_seqlen_k == max(lens_k) <= block_table.shape[1]*k.shape[1]
    return torch.cat([attend(q[a:b], paged(k, t, n), paged(v, t, n), softmax_scale, window_size) for a, b, n, t in zip(ends_q[:-1], ends_q[1:], lens_k, block_table, strict=True)])


def flash_attn_with_kvcache(q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, block_table=None,
                            softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False):
    check_tensors(q, k_cache, v_cache, block_table, (cache_seqlens,), causal, window_size)
    assert k is v is rotary_cos is cache_batch_idx is cache_leftpad is alibi_slopes is None and softcap == 0 and softmax_scale is not None and q.ndim == 4
    return torch.stack([attend(x, paged(k_cache, t, n), paged(v_cache, t, n), softmax_scale, window_size) for x, n, t in zip(q, cache_seqlens.tolist(), block_table, strict=True)])


@pytest.fixture
def stand_in(monkeypatch):
    module = ModuleType('flash_attn')
    module.flash_attn_varlen_func, module.flash_attn_with_kvcache = flash_attn_varlen_func, flash_attn_with_kvcache
    monkeypatch.setitem(sys.modules, 'flash_attn', module)


def cases(dtype, device='cpu'):
    for window in (None, 1, 5):
        for lens in (around(256), [3, 1, 300]):
            kw = dict(block_size=256, window=window, hd=64, dtype=dtype, device=device)
            yield Paged(lens, **kw)
            yield Paged(lens, takes=[(n + 1)//2 for n in lens], nq=6, nkv=2, **kw)


@pytest.mark.parametrize('dtype', (torch.float16, torch.bfloat16))
def test_wiring(stand_in, dtype):
    backend = get_backend('flash', 'cpu', dtype)
    for case in cases(dtype): assert case.error(backend) < (4e-3 if dtype == torch.float16 else 3e-2), case


def test_engine_over_the_stand_in(stand_in, tiny):
    "Blocks of 256 because the backend wants them; chunks and decode give what the reference backend gives in the same type"
    kw = dict(dtype='bfloat16', device='cpu', max_num_batched_tokens=16)
    llm, ref = LLM(str(tiny), attention_backend='flash', num_blocks=4, **kw), LLM(str(tiny), attention_backend='torch', num_blocks=64, **kw)
    assert (llm.kv_cache.block_size, ref.kv_cache.block_size) == (256, 16)
    prompts, params = [[(7*i) % 250 + 3 for i in range(n)] for n in (40, 5)], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    ours, theirs = ([o.outputs[0].token_ids for o in x.generate(prompts, params, use_tqdm=False)] for x in (llm, ref))
    assert ours == theirs


def test_refusals(stand_in, tiny, monkeypatch):
    with pytest.raises(ValueError, match='float16 or bfloat16, not torch.float32'): get_backend('flash', 'cpu', torch.float32)
    with pytest.raises(ValueError, match='block_size=16 is not a multiple of 256'): LLM(str(tiny), dtype='bfloat16', device='cpu', attention_backend='flash', block_size=16, num_blocks=64)
    monkeypatch.setitem(sys.modules, 'flash_attn', None)
    with pytest.raises(ValueError, match="attention_backend='flash' needs a package that does not load here"): get_backend('flash', 'cpu', torch.bfloat16)


def test_choice(monkeypatch):
    "flash if it loads and fits, else triton, else the reference; never looked for where it cannot fit"
    here, asked, capability, cuda = {'flash_attn', 'triton'}, [], [(9, 0)], torch.device('cuda')
    monkeypatch.setattr(attention, 'importable', lambda name: asked.append(name) or name in here)
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda device: capability[0])
    for block_size in (None, 256, 512): assert best_backend(cuda, torch.bfloat16, block_size) == 'flash'
    asked.clear()
    assert best_backend(cuda, torch.float32, None) == best_backend(cuda, torch.bfloat16, 16) == 'triton' and 'flash_attn' not in asked
    capability[0] = 7, 5
    assert best_backend(cuda, torch.float16, None) == 'triton' and 'flash_attn' not in asked
    capability[0] = 8, 0
    here.remove('flash_attn')
    assert best_backend(cuda, torch.float16, None) == 'triton'
    here.remove('triton')
    assert best_backend(cuda, torch.float16, None) == 'torch'
    asked.clear()
    assert [best_backend(torch.device(d), torch.float32, None) for d in ('cpu', 'mps')] == ['cpu', 'torch'] and not asked


@pytest.mark.cuda
@pytest.mark.parametrize('dtype', (torch.float16, torch.bfloat16))
def test_the_package_itself(dtype):
    pytest.importorskip('flash_attn')
    backend = get_backend('flash', 'cuda', dtype)
    for case in cases(dtype, 'cuda'): assert case.error(backend) < (4e-3 if dtype == torch.float16 else 3e-2), case
