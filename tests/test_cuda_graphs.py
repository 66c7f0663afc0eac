"Recorded decode passes: buckets, buffers, padding, with a stand-in for a graph where there is no GPU; how memory is shared out."
import random
from functools import partial

import pytest
import torch
from hypothesis import given, settings, strategies as st

from minivllm import LLM, SamplingParams, cuda_graphs
from minivllm.cuda_graphs import CudaGraph, DecodeBuffers, DecodeGraphs, bucket, graph_sizes, kv_cache_bytes
from minivllm.kv_cache import KVCache
from minivllm.model_runner import prepare_decode
from ref import drained, greedy, poison


class Rerun:
    "What a graph is to everybody else: the same pass, over the same tensors, its result in the same place"
    pool = None
    def __init__(self, f, pool=None): self.f, self.result, self.place = f, f(), None
    def replay(self): return self.result.copy_(self.f())


@given(st.integers(1, 2000))
def test_buckets(most):
    sizes = graph_sizes(most)
    assert sizes == sorted(set(sizes)) and sizes[-1] == min(most, 512)
    for n in range(1, sizes[-1] + 1):
        size = bucket(sizes, n)
        assert size >= n and not any(n <= other < size for other in sizes)
        assert size - n < 16 and (size < 2*n or size <= 2)


class Row:
    def __init__(self, name, rng): self.name, self.rng, self.num_preemptions, self.token_ids, self.block_table = name, rng, 0, [1], [rng.randrange(50)]
    num_tokens, last_token = property(lambda s: len(s.token_ids)), property(lambda s: s.token_ids[-1])


@settings(max_examples=30, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 4))
def test_buffers_say_what_prepare_decode_says(rng, block_size):
    "Rows that grow, lose their last block to copy-on-write, are preempted, change places, leave and come back"
    buffers, rows = DecodeBuffers(16, 12, 50, block_size, 'cpu'), [Row(i, rng) for i in range(16)]
    for _ in range(30):
        batch = rng.sample(rows, rng.randrange(1, 9)) if rng.random() < .3 else rows[:rng.randrange(1, 9)]
        for r in batch:
            if rng.random() < .1: r.num_preemptions, r.block_table = r.num_preemptions + 1, [rng.randrange(50) for _ in r.block_table]
            if rng.random() < .2: r.block_table[-1] = rng.randrange(50)
            if len(r.token_ids) < 12*block_size: r.token_ids.append(rng.randrange(99))
            if r.num_tokens > len(r.block_table)*block_size: r.block_table.append(rng.randrange(50))
        size = bucket([1, 2, 4, 8, 16], len(batch))
        buffers.fill(batch, size)
        ours, right, n = buffers.inputs(size), prepare_decode(batch, block_size), len(batch)
        for name in ('input_ids', 'positions'): assert torch.equal(getattr(ours, name)[:n], getattr(right, name))
        for name in ('slot_mapping', 'context_lens'): assert torch.equal(getattr(ours.metadata, name)[:n], getattr(right.metadata, name)), name
        for i, r in enumerate(batch): assert ours.metadata.block_tables[i, :len(r.block_table)].tolist() == r.block_table
        assert ours.metadata.slot_mapping[n:].tolist() == [50*block_size]*(size - n) and set(ours.metadata.block_tables[n:, 0].tolist()) <= {50}
        assert set(ours.metadata.context_lens[n:].tolist()) <= {1}


@pytest.mark.parametrize('backend', ('torch', 'cpu'))
def test_engine_over_recordings(tiny, backend):
    "A full house through buckets, n > 1, preemption and prefix hits, in a pool of NaN; the spare block is nobody's, padding writes only there"
    llm = poison(LLM(str(tiny), dtype='float32', device='cpu', attention_backend=backend, block_size=4, num_blocks=16, max_num_seqs=6))
    c = llm.config
    llm.kv_cache = llm.runner.kv_cache = KVCache(c.num_hidden_layers, 17, 4, c.num_key_value_heads, c.head_dim)     # one block more than the manager knows of
    llm.kv_cache.poison([16])
    llm.runner.graphs = DecodeGraphs(llm.runner, 6, llm.max_model_len, record=Rerun)
    played = []
    for size, graph in llm.runner.graphs.graphs.items():
        graph.replay = lambda size=size, replay=graph.replay: (played.append(size), replay())[1]
    prompts = [[random.Random(i).randrange(3, 250) for _ in range(3 + 4*(i % 3))] for i in range(7)]
    params = [SamplingParams(temperature=0, max_tokens=4 + 3*i, ignore_eos=True) for i in range(7)]
    outs = llm.generate(prompts, params, use_tqdm=False)
    for o, p, s in zip(outs, prompts, params): assert o.outputs[0].token_ids == greedy(llm.model, p, s.max_tokens)
    assert set(played) <= {1, 2, 4, 6} and len(set(played)) >= 3 and any(o.metrics.num_preemptions for o in outs)
    [many] = llm.generate([prompts[0]], SamplingParams(temperature=0, max_tokens=5, n=3, ignore_eos=True), use_tqdm=False)
    assert [o.token_ids for o in many.outputs] == [greedy(llm.model, prompts[0], 5)]*3
    assert llm.kv_cache.data[:, :, 16, 1:].isnan().all()
    drained(llm)


def test_more_than_recorded_runs_as_before(tiny):
    llm = LLM(str(tiny), dtype='float32', device='cpu', attention_backend='torch', block_size=4, num_blocks=33, max_num_seqs=6)
    llm.runner.graphs = DecodeGraphs(llm.runner, 2, 64, record=Rerun)
    prompts, params = [[5 + i, 9] for i in range(4)], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    assert [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)] == [greedy(llm.model, p, 4) for p in prompts]


@given(st.integers(1, 2**40), st.floats(.01, 1), st.data())
def test_memory(total, utilization, data):
    free = data.draw(st.integers(0, total))
    reserved, peak = data.draw(st.integers(0, total - free)), data.draw(st.integers(0, total))
    try: left = kv_cache_bytes(total, free, reserved, peak, utilization)
    except ValueError: return
    assert 0 < left and left + peak + (total - free - reserved) <= total*utilization + 1


def test_utilization_is_checked(tiny):
    for bad in (0, 1.5):
        with pytest.raises(ValueError, match='gpu_memory_utilization'): LLM(str(tiny), gpu_memory_utilization=bad)


def test_measuring_and_warming_up(tiny, monkeypatch, capfd):
    "The engine's start on a GPU, with made-up answers of the GPU: the largest step runs, the pool is what is left, recordings are made and announced"
    llm = LLM(str(tiny), dtype='float32', device='cpu', attention_backend='torch', block_size=4, num_blocks=33, max_num_seqs=6)
    pool, MiB = 2*2*16*4*2*16*4, 2**20                     # K/V of the 64 tokens that are tried
    answers = dict(reset_peak_memory_stats=None, synchronize=None, empty_cache=None, max_memory_allocated=30*MiB + pool, mem_get_info=(50*MiB, 100*MiB), memory_reserved=40*MiB)
    for name, value in answers.items(): monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    assert llm.gpu_kv_cache_memory(llm.runner.backend, 4, 64, 5, .9) == (90 - 10 - 30)*MiB
    with pytest.raises(ValueError, match='leaves nothing for K/V'): llm.gpu_kv_cache_memory(llm.runner.backend, 4, 64, 5, .4)
    monkeypatch.setattr(cuda_graphs, 'DecodeGraphs', partial(DecodeGraphs, record=Rerun))
    llm.warm_up(64, 6)
    assert llm.runner.graphs.sizes == [1, 2, 4, 6] and '4 recordings for 1 to 6 rows' in capfd.readouterr().err


@pytest.mark.cuda
def test_engine_with_and_without_recordings(tiny):
    kw = dict(dtype='float32', device='cuda', attention_backend='triton', block_size=4, num_blocks=64, max_num_seqs=6)
    prompts, params = [[5 + i, 9, 80] for i in range(5)], [SamplingParams(temperature=0, max_tokens=4 + 5*i, ignore_eos=True) for i in range(5)]
    run = lambda **more: [o.outputs[0].token_ids for o in LLM(str(tiny), **kw, **more).generate(prompts, params, use_tqdm=False)]
    graphs = LLM(str(tiny), **kw).runner.graphs
    assert isinstance(graphs.graphs[1], CudaGraph) and graphs.sizes == [1, 2, 4, 6]
    assert run() == run(enforce_eager=True)
