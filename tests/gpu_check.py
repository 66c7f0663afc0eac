"""Everything that needs a GPU, in one script and under six minutes on an H200: `python tests/gpu_check.py`

Needs torch with CUDA, triton, transformers, tokenizers, safetensors, numpy, pytest, and fastcore, jinja2, filelock, tqdm, huggingface_hub from pure-Python wheels; no network.
Each section is a process of its own with a time limit, so that a kernel that hangs or spoils the GPU's memory costs one section. First what must be right, many sections
side by side; then what should be fast, one after the other. Prints tables on the way and one JSON object last.

    python tests/gpu_check.py            all of it
    python tests/gpu_check.py speed      only sections whose name begins with one of these words
    python tests/gpu_check.py --smoke    the same code over tiny shapes on a CPU, in Triton's interpreter: finds typing errors, measures nothing"""
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

here = Path(__file__).resolve().parent
SMOKE = '--smoke' in sys.argv
BUDGET = 900 if SMOKE else 345                       # seconds in all
if SMOKE: os.environ['TRITON_INTERPRET'] = '1'
os.environ.setdefault('HF_HUB_OFFLINE', '1')
sys.path[:0] = [str(here.parent), str(here)]
DEVICE = 'cpu' if SMOKE else 'cuda'
SHARDS = 2 if SMOKE else 8
DRY = False                                          # run everything that is timed just once, so that it is compiled

QWEN = dict(family='Qwen3', hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8, head_dim=128, vocab_size=151936,
            max_position_embeddings=40960, rms_norm_eps=1e-6, rope_parameters=dict(rope_type='default', rope_theta=1e6))          # Qwen3-0.6B
LLAMA = dict(family='Llama', hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8, head_dim=64, vocab_size=128256,
             max_position_embeddings=131072, rms_norm_eps=1e-5, rope_parameters=dict(rope_type='llama3', rope_theta=5e5, factor=32., low_freq_factor=1., high_freq_factor=4.,
                                                                             original_max_position_embeddings=8192))                   # Llama-3.2-1B
if SMOKE:
    for shape in (QWEN, LLAMA): shape.update(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=500)


# ---- what must be right

def kernel_cases():
    "Shapes of every class: lengths around a block, ragged, long; groups, head dimensions, block sizes, windows, types"
    import torch
    from paged import around
    types = (torch.float32, torch.float16) if SMOKE else (torch.bfloat16, torch.float16, torch.float32)
    for dtype in types:
        for hd in (64, 80, 96, 128, 256)[:2 if SMOKE else 5]:
            for i, group in enumerate((1, 3, 4, 8)):
                bs, window = (1, 16, 32, 256)[i], (None, None, 20, 700)[(i + hd) % 4]
                lens = [40, 3] if SMOKE else [*around(bs), 600, 2049, 33]
                kw = dict(nq=2*group, nkv=2, hd=hd, block_size=bs, window=window, dtype=dtype, device=DEVICE, seed=hd + i)
                yield 'decode', (lens,), kw
                yield 'prefill', (lens, [(n + 1)//2 for n in lens]), kw
    if SMOKE: return
    for dtype in types:
        yield 'prefill, one long prompt', ([8192], [8192]), dict(nq=16, nkv=8, hd=128, dtype=dtype, device=DEVICE)
        yield 'decode, one long history', ([100_000],), dict(nq=16, nkv=8, hd=128, dtype=dtype, device=DEVICE)
        yield 'decode, a full house', ([100 + 7*i for i in range(256)],), dict(nq=16, nkv=8, hd=128, dtype=dtype, device=DEVICE)
        yield 'prefill, ragged', ([1 + 37*i % 500 for i in range(60)], [1 + (37*i % 500)//(1 + i % 3) for i in range(60)]), dict(nq=16, nkv=8, hd=128, dtype=dtype, device=DEVICE)


def kernels(shard):
    "The Triton kernels against float64"
    from minivllm.kernels import gpu
    from paged import TOLERANCE, Paged
    worst, bad, count = {}, [], 0
    for kind, args, kw in [*kernel_cases()][shard::SHARDS]:
        case, backend = Paged(*args, **kw), gpu.TritonAttention(DEVICE, kw['dtype'])
        error, name = case.error(backend), f'{kind.split(",")[0]} {str(kw["dtype"])[6:]}'
        worst[name], count = max(worst.get(name, 0), error), count + 1
        if not error < TOLERANCE[kw['dtype']]: bad.append([kind, str(error), str(kw), str(args)[:200]])
    return dict(ok=not bad, cases=count, worst=worst, bad=bad)


def pytests():
    "The tests of the repository that have something to say on a GPU"
    done = subprocess.run([sys.executable, '-m', 'pytest', '-q', '-x', '-p', 'no:cacheprovider', *(str(here/f'test_{n}.py') for n in ('cuda_graphs', 'flash', 'gpu_kernels')),
                           '-k', 'graphs or flash or rms or rotate or silu or fused or two_to_the_31 or engine_gives'], capture_output=True, text=True, cwd=here.parent)
    return dict(ok=done.returncode == 0, tail=done.stdout[-1500:] if done.returncode else done.stdout.splitlines()[-1])


def checkpoint(folder, family, **shape):
    "A random checkpoint in bf16 whose answers depend on the whole prompt, saved by transformers, with a tokenizer of bytes and made-up words; returns the model"
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    config = getattr(transformers, family + 'Config')(**shape, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None)
    with torch.device(DEVICE): model = getattr(transformers, family + 'ForCausalLM')._from_config(config, dtype=torch.bfloat16).eval()
    gen = torch.Generator(DEVICE).manual_seed(0)
    with torch.no_grad():
        for n, p in model.named_parameters():
            mean, std = (1., .1) if 'norm' in n else (0., 1.) if 'embed' in n else (0., 1.6*p.shape[-1]**-.5)
            p.copy_(torch.empty(p.shape, device=DEVICE).normal_(mean, std, generator=gen))
    model.save_pretrained(folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tok = Tokenizer(models.BPE({t: i for i, t in enumerate(letters + [f'word{i}' for i in range(shape['vocab_size'] - len(letters))])}, []))
    tok.decoder = decoders.ByteLevel()
    tok.save(f'{folder}/tokenizer.json')
    return model


def give_back():
    "What nobody uses any more, to the GPU"
    import gc

    import torch
    gc.collect()
    if not SMOKE: torch.cuda.empty_cache()


def run(runner, blocks, seq, n):
    "Prefill the next n tokens of a sequence; logits if its prompt ends there"
    assert blocks.allocate(seq, n)
    logits = runner.run_prefill([(seq, n)])
    seq.num_computed_tokens += n
    return logits


def engine(shape):
    "The engine against transformers: greedy tokens in fp32, logits in bf16, transfers in a step"
    import warnings

    import torch
    from minivllm import LLM, SamplingParams
    from minivllm.sequence import Sequence
    out, vocab = {}, shape['vocab_size']
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        hf = checkpoint(folder, **shape)
        kw = dict(device=DEVICE, attention_backend='triton', max_num_seqs=8, num_blocks=40 if SMOKE else 400, max_num_batched_tokens=12 if SMOKE else 512, max_model_len=None if SMOKE else 4096)
        lens, new = ((1, 5, 17), 4) if SMOKE else ((1, 15, 16, 17, 300, 1000), 32)
        prompts = [torch.randint(vocab, (n,)).tolist() for n in lens]
        ids = torch.randint(vocab, (1, 33 if SMOKE else 333), device=DEVICE)
        # bf16: as near to fp32 as transformers' own bf16 is, in prefill and in decode
        with LLM(folder, dtype='bfloat16', **kw) if not SMOKE else LLM(folder, dtype='float16', **kw) as llm:
            seq = Sequence('s', ids[0, :-1].tolist())
            first = run(llm.runner, llm.block_manager, seq, seq.num_tokens)
            seq.append_token(ids[0, -1].item(), now=0.)
            assert llm.block_manager.allocate(seq, 1)
            ours = torch.cat([first, llm.runner.run_decode([seq])]).double()
            llm.block_manager.free(seq)
            with torch.no_grad(): theirs = hf(ids).logits[0, -2:].double()
            if not SMOKE:
                with warnings.catch_warnings(record=True) as seen:
                    warnings.simplefilter('always')
                    for p in prompts: llm.add_request(p, SamplingParams(temperature=.8, top_p=.9, top_k=50, max_tokens=8, ignore_eos=True))
                    while any(s.num_output_tokens < 3 for r in llm.requests.values() for s in r.sequences): llm.step()
                    seen.clear()
                    torch.cuda.set_sync_debug_mode('warn')
                    llm.step()
                    torch.cuda.set_sync_debug_mode('default')
                out['waits_in_a_step'] = sum('synchroniz' in str(w.message) for w in seen)
                out['where'] = sorted({f'{Path(w.filename).name}:{w.lineno}' for w in seen})
        hf = hf.float()
        with torch.no_grad(): right = hf(ids).logits[0, -2:].double()
        scale = right.std().item()
        out |= dict(error_16_bit=((ours - right).abs().max()/scale).item(), error_of_transformers=((theirs - right).abs().max()/scale).item())
        # fp32: every token is transformers' choice, or was tied to it
        with LLM(folder, dtype='float32', **kw) as llm:
            outs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=new, ignore_eos=True), use_tqdm=False)
        gap, same, total, different = 0., 0, 0, set()
        for p, o in zip(prompts, outs):
            tokens = o.outputs[0].token_ids
            with torch.no_grad(): logits = hf(torch.tensor([p + tokens[:-1]], device=DEVICE)).logits[0, len(p) - 1:]
            behind = logits.max(-1).values - logits.gather(1, torch.tensor(tokens, device=DEVICE)[:, None])[:, 0]
            gap, same, total, different = max(gap, behind.max().item()), same + (behind == 0).sum().item(), total + len(tokens), different | set(tokens)
        out |= dict(fp32_tokens=total, fp32_same=same, fp32_worst_gap=gap/scale, different_tokens=len(different))
    out['ok'] = gap/scale < 1e-3 and same >= .98*total and out['error_16_bit'] <= max(1.5*out['error_of_transformers'], 1e-3) and len(different) > total//4 and out.get('waits_in_a_step', 1) <= 1
    return out


# ---- what should be fast

def median_ms(f, repeat=20, warm=3):
    "Median of device times of one call"
    import torch
    for _ in range(1 if DRY else warm): f()
    if SMOKE or DRY:
        start = time.perf_counter(); f()
        return (time.perf_counter() - start)*1e3
    times = []
    for _ in range(repeat):
        a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        a.record(); f(); b.record()
        torch.cuda.synchronize()
        times.append(a.elapsed_time(b))
    return sorted(times)[len(times)//2]


def graph_ms(f, inner=10):
    "Device time of one call among several in one recording: no gaps between kernels"
    import torch
    if SMOKE or DRY: return median_ms(f)
    f(); torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(inner): f()
    return median_ms(graph.replay, repeat=10)/inner


def ceilings():
    import torch
    n, m = (2**20, 256) if SMOKE else (2**31, 8192)
    x, y = torch.randint(255, (n,), dtype=torch.uint8, device=DEVICE), torch.empty(n, dtype=torch.uint8, device=DEVICE)
    copy = 2*n/median_ms(lambda: y.copy_(x), 10)/1e9
    a, b = torch.randn(m, m, device=DEVICE, dtype=torch.bfloat16), torch.randn(m, m, device=DEVICE, dtype=torch.bfloat16)
    return copy, 2*m**3/median_ms(lambda: a @ b, 10)/1e9          # TB/s... GB/ms = TB/s, TFLOP/s


def attention_case(contexts, takes, nq, nkv, hd, layers, block_size=16):
    "Scattered K/V of several layers (so that no cache holds them), random numbers, metadata"
    import torch
    from minivllm.attention import build_metadata
    from minivllm.kv_cache import KVCache
    need = [-(-n//block_size) for n in contexts]
    pool = KVCache(layers, sum(need), block_size, nkv, hd, torch.float16 if SMOKE else torch.bfloat16, DEVICE)
    pool.data.normal_()
    free = torch.randperm(sum(need)).tolist()
    tables = [[free.pop() for _ in range(n)] for n in need]
    q = torch.randn(sum(takes), nq, hd, device=DEVICE).to(pool.data.dtype)
    return q, pool, build_metadata(tables, contexts, takes, block_size, max(takes) > 1, DEVICE)


def decode_speed(backend, batch, history, nq, nkv, hd, layers=4, **kw):
    if SMOKE: batch, history, layers = 2, 40, 1
    q, pool, md = attention_case([history]*batch, [1]*batch, nq, nkv, hd, layers, **kw)
    def f():
        for i in range(layers): backend.decode(q, *pool.layer(i), md, hd**-.5)
    ms = graph_ms(f, 3)/layers
    return ms, 2*batch*history*nkv*hd*2/ms/1e9


def prefill_speed(backend, tokens, nq, nkv, hd, **kw):
    if SMOKE: tokens = 40
    q, pool, md = attention_case([tokens], [tokens], nq, nkv, hd, 1, **kw)
    ms = median_ms(lambda: backend.prefill(q, *pool.layer(0), md, hd**-.5), 10)
    return ms, 4*nq*hd*tokens*(tokens + 1)/2/ms/1e9


def speed_kernels():
    "Attention alone against the measured ceilings, and what other tiles would give"
    import math

    import torch
    import triton
    from minivllm.attention import best_backend, get_backend
    from minivllm.kernels import gpu
    copy, rate = ceilings()
    out = dict(copy_tb_s=copy, matrix_tflop_s=rate, decode={}, prefill={}, other_tiles={})
    dtype = torch.float16 if SMOKE else torch.bfloat16
    backends = {'triton': (gpu.TritonAttention(DEVICE, dtype), 16)}
    if not SMOKE and best_backend(torch.device('cuda'), dtype, None) == 'flash': backends['flash'] = get_backend('flash', 'cuda', dtype), 256
    for name, (backend, bs) in backends.items():
        for batch, history, nq, nkv, hd in ((64, 2048, 16, 8, 128), (64, 2048, 32, 8, 64), (1, 8192, 16, 8, 128), (8, 32768, 16, 8, 128)):
            ms, tb = decode_speed(backend, batch, history, nq, nkv, hd, block_size=bs)
            out['decode'][f'{name} {batch} x {history}, {nq}/{nkv} heads of {hd}'] = dict(ms=ms, tb_s=tb, share=tb/copy)
        for tokens, nq, nkv, hd in ((8192, 16, 8, 128), (8192, 32, 8, 64), (2048, 16, 8, 128)):
            ms, tf = prefill_speed(backend, tokens, nq, nkv, hd, block_size=bs)
            out['prefill'][f'{name} {tokens}, {nq}/{nkv} heads of {hd}'] = dict(ms=ms, tflop_s=tf, share=tf/rate)
    (q, pool, md), scale = attention_case([64 if SMOKE else 8192], [64 if SMOKE else 8192], 16, 8, 128, 1), 128**-.5*math.log2(math.e)
    o, T = torch.empty_like(q), len(q)
    for rows, tile, warps, stages in ((64, 64, 4, 3), (128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 2), (128, 128, 8, 3), (128, 64, 4, 3))[:1 if SMOKE else 6]:
        f = lambda: gpu.prefill_kernel[(8, T//(rows//2) + 1)](q, *pool.layer(0), md.block_tables, md.context_lens, md.cu_seqlens_q, o, scale, 2**30, 1, q.stride(0), md.block_tables.stride(0),
            GROUP=2, ROWS=rows, HD=128, WIDTH=128, KV_HEADS=8, BLOCK_SIZE=16, TILE=tile, WINDOWED=False, num_warps=warps, num_stages=stages)
        try: out['other_tiles'][f'prefill rows {rows}, tile {tile}, {warps} warps, {stages} stages'] = dict(tflop_s=4*16*128*T*(T + 1)/2/median_ms(f, 5)/1e9)
        except triton.OutOfResources as e: out['other_tiles'][f'prefill rows {rows}, tile {tile}, {warps} warps, {stages} stages'] = str(e)
    n, history = (2, 40) if SMOKE else (64, 2048)
    (q, pool, md), o = attention_case([history]*n, [1]*n, 16, 8, 128, 1 if SMOKE else 4), torch.empty(n, 16, 128, dtype=dtype, device=DEVICE)
    for tile, splits, warps, stages in ((64, 1, 4, 3), (64, 1, 4, 4), (32, 1, 4, 4), (128, 1, 4, 2), (64, 1, 8, 3), (64, 2, 4, 3), (64, 4, 4, 3))[:1 if SMOKE else 7]:
        parts, sums = torch.empty(n*16*splits, 128, device=DEVICE), torch.empty(n*16*splits, device=DEVICE)
        def f():
            for i in range(pool.num_layers):
                gpu.decode_kernel[(n, 8, splits)](q, *pool.layer(i), md.block_tables, md.context_lens, o, parts, sums, scale, 2**30, q.stride(0), md.block_tables.stride(0),
                    GROUP=2, ROWS=16, HD=128, WIDTH=128, KV_HEADS=8, BLOCK_SIZE=16, TILE=tile, SPLITS=splits, num_warps=warps, num_stages=stages)
                if splits > 1: gpu.merge_kernel[(n*16,)](parts, sums, o, HD=128, WIDTH=128, SPLITS=splits, num_warps=2)
        try: out['other_tiles'][f'decode tile {tile}, {splits} splits, {warps} warps, {stages} stages'] = dict(share=2*n*history*8*128*2/(graph_ms(f, 3)/pool.num_layers)/1e9/copy)
        except triton.OutOfResources as e: out['other_tiles'][f'decode tile {tile}, {splits} splits, {warps} warps, {stages} stages'] = str(e)
    out['targets'] = dict(decode_64_x_2048=[out['decode']['triton 64 x 2048, 16/8 heads of 128']['share'], .7], prefill_attention_8192=[out['prefill']['triton 8192, 16/8 heads of 128']['share'], .5])
    return out


def compile_ahead():
    "Put the variants that will be timed into Triton's cache on disk, while other sections check results"
    global DRY
    DRY = True
    speed_kernels()
    return {}


def speed_model():
    "Whole passes of the Qwen3-0.6B shape: start-up, decode steps eager and recorded, a prefill of 8,192 tokens"
    import torch
    from minivllm import LLM
    from minivllm.sequence import Sequence
    copy, rate = ceilings()
    out = dict(decode={})
    tokens = 64 if SMOKE else 8192
    with tempfile.TemporaryDirectory() as folder:
        checkpoint(folder, **QWEN)
        give_back()
        start = time.perf_counter()
        llm = LLM(folder, device=DEVICE, dtype='float16' if SMOKE else 'bfloat16', attention_backend='triton', max_num_batched_tokens=tokens, num_blocks=40 if SMOKE else None)
        out |= dict(start_seconds=time.perf_counter() - start, graphs=repr(llm.runner.graphs), kv_cache=repr(llm.kv_cache), max_model_len=llm.max_model_len)
        if not SMOKE: out['memory_used'] = 1 - torch.cuda.mem_get_info()[0]/torch.cuda.mem_get_info()[1]
        linear = sum(p.numel() for n, p in llm.model.named_parameters() if p.ndim == 2 and 'embed' not in n)
        body = linear - llm.model.lm_head.weight.numel()
        graphs, c, blocks = llm.runner.graphs, llm.config, llm.block_manager
        for n, history in ((1, 20), (2, 20)) if SMOKE else ((1, 2048), (8, 2048), (64, 2048), (256, 1024)):
            seqs = [Sequence(str(i), [1 + i]*history) for i in range(n)]
            for s in seqs:
                assert blocks.allocate(s, history)
                s.num_computed_tokens = history - 1
            size = 2*(linear + n*history*c.num_hidden_layers*c.num_key_value_heads*c.head_dim*2)
            row = out['decode'][f'{n} x {history}'] = {}
            for name, g in (('recorded', graphs), ('eager', None)):
                llm.runner.graphs = g
                def step(): return llm.runner.run_decode(seqs).argmax(-1).tolist()
                step(); step()
                times = []
                for _ in range(1 if SMOKE else 12):
                    start = time.perf_counter(); step()
                    times.append((time.perf_counter() - start)*1e3)
                row[f'{name}_ms'] = sorted(times)[len(times)//2]
            row |= dict(gain=row['eager_ms']/row['recorded_ms'], share_of_copy=size/row['recorded_ms']/1e9/copy)
            llm.runner.graphs = graphs
            for s in seqs: blocks.free(s)
        seq = Sequence('long', [(7*i) % 400 for i in range(tokens)])
        assert blocks.allocate(seq, tokens)
        ms = median_ms(lambda: llm.runner.run_prefill([(seq, tokens)]), 5)
        flop = 2*body*tokens + 2*llm.model.lm_head.weight.numel() + 4*c.num_hidden_layers*c.num_attention_heads*c.head_dim*tokens*(tokens + 1)/2
        out['prefill'] = dict(tokens=tokens, ms=ms, tflop_s=flop/ms/1e9, share=flop/ms/1e9/rate, tokens_s=tokens/ms*1e3)
        llm.close()
    out['targets'] = dict(prefill_8192=[out['prefill']['share'], .5], graphs_at_batch_1=[[*out['decode'].values()][0]['gain'], 1.5])
    return out


def workload():
    "256 requests of 100 to 1,024 tokens in and out, as in nano-vllm's benchmark"
    import random
    rng, n, low, high = random.Random(0), *((6, 4, 12) if SMOKE else (256, 100, 1024))
    prompts = [[rng.randrange(256 if SMOKE else 10000) for _ in range(rng.randint(low, high))] for _ in range(n)]
    return prompts, [rng.randint(low, high) for _ in range(n)]


def speed_workload():
    "The engine on that workload, as a user starts it"
    from minivllm import LLM, SamplingParams
    prompts, lens = workload()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint(folder, **QWEN)
        give_back()
        with LLM(folder, device=DEVICE, dtype='float16' if SMOKE else 'bfloat16', max_model_len=None if SMOKE else 4096, num_blocks=60 if SMOKE else None, attention_backend='triton' if SMOKE else None) as llm:
            llm.generate(prompts[:2], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
            steps, inside, step = 0, 0., llm.step
            def counted():
                nonlocal steps, inside
                steps, start = steps + 1, time.perf_counter()
                deltas = step()
                inside += time.perf_counter() - start
                return deltas
            llm.step = counted
            params = [SamplingParams(temperature=.6, max_tokens=n, ignore_eos=True) for n in lens]
            start = time.perf_counter()
            outs = llm.generate(prompts, params, use_tqdm=False)
            seconds, tokens = time.perf_counter() - start, sum(len(o.outputs[0].token_ids) for o in outs)
            assert tokens == sum(lens)
            return dict(tokens=tokens, seconds=seconds, tokens_s=tokens/seconds, steps=steps, seconds_in_steps=inside, backend=type(llm.runner.backend).__name__,
                        preemptions=sum(o.metrics.num_preemptions for o in outs))


def speed_transformers(limit=50):
    "transformers' continuous batching on the same workload; if it does not finish in time its rate is an upper bound"
    from transformers import GenerationConfig
    prompts, lens = workload()
    with tempfile.TemporaryDirectory() as folder: model = checkpoint(folder, **QWEN)
    config = GenerationConfig(do_sample=True, temperature=.6, max_new_tokens=max(lens), eos_token_id=-1, pad_token_id=0, top_k=0, top_p=1.)
    with model.continuous_batching_context_manager(generation_config=config, block=True, timeout=5) as manager:
        start, done = time.perf_counter(), 0
        for p, n in zip(prompts, lens): manager.add_request(p, max_new_tokens=n, eos_token_id=-1)
        tokens, errors = 0, []
        while done < len(prompts) and time.perf_counter() - start < limit and manager.is_running():
            result = manager.get_result(timeout=1)
            if result is None or not result.is_finished(): continue
            done, tokens = done + 1, tokens + len(result.generated_tokens)
            if result.error: errors.append(result.error)
        seconds = time.perf_counter() - start
    return dict(finished=done, of=len(prompts), tokens=tokens, seconds=seconds, tokens_s_at_most=sum(lens)/seconds, attention=model.config._attn_implementation, errors=errors[:3])


SECTIONS = {**{f'right kernels {i}': lambda i=i: kernels(i) for i in range(SHARDS)}, 'right engine qwen3': lambda: engine(QWEN), 'right engine llama': lambda: engine(LLAMA), 'right pytest': pytests,
            'right compile': compile_ahead, 'speed kernels': speed_kernels, 'speed model': speed_model, 'speed workload': speed_workload, 'speed transformers': speed_transformers}
LIMITS = {'right': 110, 'speed kernels': 60, 'speed model': 60, 'speed workload': 75, 'speed transformers': 100}


def start_section(name, folder):
    path = Path(folder)/f'{name}.json'
    log = open(Path(folder)/f'{name}.log', 'w')
    return name, subprocess.Popen([sys.executable, __file__, '--section', name, str(path), *(['--smoke'] if SMOKE else [])], stdout=log, stderr=subprocess.STDOUT), path, time.time()


def finish_section(name, process, path, began, until):
    "Its result, or why there is none"
    try: process.wait(max(1, until - time.time()))
    except subprocess.TimeoutExpired:
        process.kill(); process.wait()
        return dict(ok=False, why=f'stopped after {time.time() - began:.0f} s', log=path.with_suffix('.log').read_text()[-1500:])
    if not path.exists(): return dict(ok=False, why=f'exit code {process.returncode}', log=path.with_suffix('.log').read_text()[-3000:])
    return dict(ok=True) | json.loads(path.read_text()) | dict(section_seconds=round(time.time() - began, 1))


def show(name, value, indent=''):
    "A result as lines that a person can read"
    short = lambda x: f'{x:.4g}' if isinstance(x, float) else str(x)
    if not isinstance(value, dict): print(f'{indent}{name}: {short(value)}')
    elif all(not isinstance(v, dict) for v in value.values()): print(f'{indent}{name}: ' + ', '.join(f'{k} {short(v)}' for k, v in value.items() if v != []))
    else:
        print(f'{indent}{name}')
        for k, v in value.items(): show(k, v, indent + '  ')
    sys.stdout.flush()


def main():
    import torch
    if not SMOKE and not torch.cuda.is_available(): sys.exit('no GPU here; --smoke runs the same code on a CPU')
    start, results = time.time(), {}
    asked = [a for a in sys.argv[1:] if not a.startswith('-')]
    names = [n for n in SECTIONS if not asked or any(n.startswith(a) or a in n for a in asked)]
    limit = lambda name: min(time.time() + (300 if SMOKE else next(v for k, v in LIMITS.items() if name.startswith(k))), start + BUDGET)
    with tempfile.TemporaryDirectory() as folder:
        right = [n for n in names if n.startswith('right')]
        for batch in [right[i:i + 2] for i in range(0, len(right), 2)] if SMOKE else [right]:
            for section in [(*start_section(n, folder), limit(n)) for n in batch]:
                results[section[0]] = finish_section(*section)
                show(section[0], results[section[0]])
        for name in [n for n in names if n.startswith('speed')]:
            if time.time() > start + BUDGET - 20: results[name] = dict(ok=False, why='no time left')
            else: results[name] = finish_section(*start_section(name, folder), limit(name))
            show(name, results[name])
    ours, theirs = (results.get(f'speed {n}', {}) for n in ('workload', 'transformers'))
    targets = {k: v for r in results.values() for k, v in r.get('targets', {}).items()}
    if 'tokens_s' in ours and 'tokens_s_at_most' in theirs and theirs['finished']: targets['workload_over_transformers'] = [ours['tokens_s']/theirs['tokens_s_at_most'], 3]
    for k, (value, wanted) in targets.items(): print(f'{"reached" if value >= wanted else "MISSED "} {k}: {value:.2f}, wanted {wanted}')
    import transformers
    import triton
    print(json.dumps(dict(ok=all(r['ok'] for n, r in results.items() if n.startswith('right')), targets={k: dict(value=v, wanted=w, reached=v >= w) for k, (v, w) in targets.items()},
        device='cpu, smoke test: no number means anything' if SMOKE else torch.cuda.get_device_name(), torch=torch.__version__, triton=triton.__version__, transformers=transformers.__version__,
        seconds=round(time.time() - start, 1), results=results)))


if __name__ == '__main__':
    if '--section' in sys.argv:
        name, path = sys.argv[sys.argv.index('--section') + 1:][:2]
        result = SECTIONS[name]()
        Path(path).write_text(json.dumps(result))
    else: main()
