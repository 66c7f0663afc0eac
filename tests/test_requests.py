"""What a request may ask, through the whole engine: samples, seeds, reports, stops, and the prefix cache that must not show.

Log-probabilities are compared with those of the plain model, which adds in another order: hence 5e-5 where logits are as large as 25."""
import random

import pytest
import torch

from minivllm import LLM, SamplingParams
from minivllm.model import reference_attend
from ref import drained, greedy, poison


def engine(tiny, **kw):
    return poison(LLM(str(tiny), **dict(dtype='float32', block_size=4, num_blocks=64) | kw))


def prompt(n, seed=0): return [random.Random(seed).randrange(3, 290) for _ in range(n)]
def greedily(n=8, **kw): return SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, **kw)
def drawn(n=12, **kw): return SamplingParams(temperature=1, max_tokens=n, ignore_eos=True, **kw)
def answers(llm, prompts, params): return [[c.token_ids for c in o.outputs] for o in llm.generate(prompts, params, use_tqdm=False)]


@torch.inference_mode()
def raw_logprobs(model, ids):
    "`[T, vocab]` log-softmax of the raw fp32 logits of the plain model."
    hidden = model(torch.tensor(ids), torch.arange(len(ids)), reference_attend(model.config))
    return model.compute_logits(hidden).log_softmax(-1)


# --- n > 1

@pytest.mark.parametrize('where', [dict(), dict(max_num_seqs=2), dict(num_blocks=12), dict(enable_prefix_caching=False, max_num_batched_tokens=5)])
def test_SA5_n_copies_are_distinct_and_reproducible(tiny, where):
    llm = engine(tiny, **where)
    [first] = answers(llm, [prompt(10)], SamplingParams(n=4, seed=42, max_tokens=12, ignore_eos=True))
    assert len({tuple(a) for a in first}) == 4 and all(len(a) == 12 for a in first)
    again = answers(llm, [prompt(7, 1), prompt(10)], [drawn(), SamplingParams(n=4, seed=42, max_tokens=12, ignore_eos=True)])
    assert again[1] == first
    assert answers(llm, [prompt(10)], drawn(seed=42)) == [first[:1]]           # the first of n is the answer one gets alone
    drained(llm)


def test_SA5_others_go_on_when_the_first_ends(tiny):
    llm = engine(tiny)
    [out] = llm.generate([prompt(10)], SamplingParams(n=6, seed=3, max_tokens=30), use_tqdm=False)
    assert [c.index for c in out.outputs] == list(range(6)) and all(c.finish_reason in ('stop', 'length') for c in out.outputs)
    assert any(len(c.token_ids) == 30 for c in out.outputs)
    drained(llm)


def test_SA6_deltas_of_n_samples_stay_apart(tiny):
    llm = engine(tiny)
    texts, ids, last = ['']*3, [[], [], []], None
    for d in llm.stream(prompt(9), SamplingParams(n=3, seed=1, max_tokens=10)):
        texts[d.index] += d.text
        ids[d.index] += d.token_ids
        last = d
    assert [(c.text, c.token_ids) for c in last.output.outputs] == list(zip(texts, ids))


def test_n_shares_the_prompt_and_copies_the_last_block(tiny):
    llm = engine(tiny)
    llm.add_request(prompt(10), SamplingParams(n=4, seed=1, max_tokens=5, ignore_eos=True))
    llm.step()
    assert llm.block_manager.num_blocks - llm.block_manager.num_free_blocks == 3       # 10 tokens, once, not four times
    copied = 0
    schedule = llm.scheduler.schedule
    def watch(now):
        nonlocal copied
        work = schedule(now)
        copied += len(work.decode_sequences) and llm.block_manager.num_blocks - llm.block_manager.num_free_blocks
        return work
    llm.scheduler.schedule = watch
    llm.step()
    assert copied == 2 + 4                                                              # two full ones shared, the half-full one four times
    llm.scheduler.schedule = schedule
    while llm.has_unfinished_requests(): llm.step()
    drained(llm)


def test_n_aborted_in_the_middle(tiny):
    llm = engine(tiny, max_num_seqs=2)
    for steps in range(5):
        llm.add_request(prompt(10), SamplingParams(n=4, max_tokens=5), 'r')
        for _ in range(steps): llm.step()
        assert llm.abort_request('r')
        drained(llm)


# --- seeds

def test_SA1_seeded_is_the_same_alone_and_in_company(tiny):
    llm = engine(tiny)
    [alone] = answers(llm, [prompt(6)], drawn(seed=42))
    for order in (0, 1, 2):
        prompts, params = [prompt(5, 1), prompt(9, 2)], [drawn(), greedily()]
        prompts.insert(order, prompt(6)); params.insert(order, drawn(seed=42))
        assert answers(llm, prompts, params)[order] == alone
    free = [answers(llm, [prompt(6)], drawn())[0] for _ in range(5)]
    assert len({tuple(a[0]) for a in free}) > 1


def test_SA3_seed_survives_preemption(tiny):
    wide, narrow = engine(tiny), engine(tiny, num_blocks=10)
    prompts, params = [prompt(8, i) for i in range(5)], [drawn(20, seed=i) for i in range(5)]
    outs = narrow.generate(prompts, params, use_tqdm=False)
    assert sum(o.metrics.num_preemptions for o in outs) > 0
    assert [[o.outputs[0].token_ids] for o in outs] == answers(wide, prompts, params)


def test_engine_seed_repeats_requests_without_one(tiny):
    a, b = (answers(engine(tiny, seed=5), [prompt(6), prompt(7)], drawn()) for _ in range(2))
    assert a == b != answers(engine(tiny, seed=6), [prompt(6), prompt(7)], drawn())


# --- penalties see the whole history

def test_SA11_penalties_after_preemption_and_cache_hits(tiny):
    params = [greedily(20, repetition_penalty=1.7, presence_penalty=.5, frequency_penalty=.3) for _ in range(5)]
    prompts = [prompt(8, i) for i in range(5)]
    want = answers(engine(tiny, enable_prefix_caching=False), prompts, params)
    narrow = engine(tiny, num_blocks=10)
    assert answers(narrow, prompts, params) == want == answers(narrow, prompts, params)
    assert want != answers(narrow, prompts, [greedily(20)] * 5)


# --- ends

def eos_engine(tiny, monkeypatch, tokens):
    "A model that is a table: after the prompt it emits `tokens`, then 5 for ever."
    llm = engine(tiny)
    def logits(seqs):
        out = torch.zeros(len(seqs), llm.config.vocab_size)
        for row, s in zip(out, seqs): row[tokens[s.num_output_tokens] if s.num_output_tokens < len(tokens) else 5] = 20.
        return out
    ending = lambda work: [s for s, n in work if s.num_computed_tokens + n == s.num_tokens]
    monkeypatch.setattr(llm.runner, 'run_prefill', lambda work, see=None: logits(ending(work)))
    monkeypatch.setattr(llm.runner, 'run_decode', logits)
    return llm


def test_SA16_min_tokens_then_eos(tiny, monkeypatch):
    llm = eos_engine(tiny, monkeypatch, [])
    eos = llm.tokenizer.eos_token_id
    [out] = llm.generate([prompt(4)], SamplingParams(temperature=0, max_tokens=20, min_tokens=4, logit_bias={eos: 100}), use_tqdm=False)
    assert len(out.outputs[0].token_ids) == 5 and out.outputs[0].token_ids[-1] == eos and eos not in out.outputs[0].token_ids[:4]


def test_SA18_ignore_eos_ignores_all_of_them(tiny, monkeypatch):
    llm = eos_engine(tiny, monkeypatch, [7, 2, 8])
    llm.eos_ids = frozenset({2, 7, 8})
    [out] = llm.generate([prompt(4)], greedily(6), use_tqdm=False)
    assert out.outputs[0].token_ids == [7, 2, 8, 5, 5, 5] and out.outputs[0].finish_reason == 'length'


def test_SA19_every_eos_of_the_list_stops(tiny, tmp_path):
    import json
    import shutil
    folder = shutil.copytree(tiny, tmp_path/'model')
    token = greedy(engine(tiny).model, prompt(6), 3)[2]
    (folder/'generation_config.json').write_text(json.dumps(dict(eos_token_id=[298, 299, token])))
    llm = engine(folder)
    [out] = llm.generate([prompt(6)], SamplingParams(temperature=0, max_tokens=9), use_tqdm=False)
    o = out.outputs[0]
    assert o.token_ids[-1] == token and (o.finish_reason, o.stop_reason) == ('stop', None)
    assert o.text == llm.tokenizer.decode(o.token_ids[:-1])


def test_stop_token_is_in_the_ids_and_not_in_the_text(tiny):
    llm = engine(tiny)
    ids = greedy(llm.model, prompt(6), 8)
    stop = ids[4]
    first = ids.index(stop)
    o = llm.generate([prompt(6)], greedily(8, stop_token_ids=[stop]), use_tqdm=False)[0].outputs[0]
    assert (o.token_ids, o.finish_reason, o.stop_reason) == (ids[:first+1], 'stop', stop) and o.text == llm.tokenizer.decode(ids[:first])
    o = llm.generate([prompt(6)], greedily(8, stop_token_ids=[stop], include_stop_str_in_output=True), use_tqdm=False)[0].outputs[0]
    assert o.text == llm.tokenizer.decode(ids[:first+1])


def test_TX7_stop_string_over_several_tokens(tiny, monkeypatch):
    llm = eos_engine(tiny, monkeypatch, [])
    ids = [llm.tokenizer.encode(t) for t in ('ABC', 'DEF', 'G', 'HI', 'J', 'K')]
    llm = eos_engine(tiny, monkeypatch, sum(ids, []))
    deltas = list(llm.stream(prompt(4), greedily(30, stop=['DEFGHIJ'])))
    assert ''.join(d.text for d in deltas) == 'ABC' and (deltas[-1].finish_reason, deltas[-1].stop_reason) == ('stop', 'DEFGHIJ')
    assert not any('D' in d.text for d in deltas)


def test_TX13_no_stop_before_min_tokens(tiny, monkeypatch):
    llm = eos_engine(tiny, monkeypatch, [])
    llm = eos_engine(tiny, monkeypatch, llm.tokenizer.encode('xSTOPyyyyyyyyyySTOPz'))
    o = llm.generate([prompt(4)], greedily(40, stop=['STOP'], min_tokens=10), use_tqdm=False)[0].outputs[0]
    assert o.text == 'xSTOPyyyyyyyyyy' and o.stop_reason == 'STOP'


# --- reports

@pytest.mark.parametrize('cache', [True, False])
def test_logprobs_are_those_of_the_raw_logits(tiny, cache):
    llm = engine(tiny, enable_prefix_caching=cache)
    for _ in range(2):
        [out] = llm.generate([prompt(9)], drawn(6, seed=1, logprobs=3, top_k=5, repetition_penalty=1.5), use_tqdm=False)
        o = out.outputs[0]
        lp = raw_logprobs(llm.model, prompt(9) + o.token_ids)[8:-1]
        for token, report, row in zip(o.token_ids, o.logprobs, lp):
            assert token in report and len(report) in (3, 4) and set(row.topk(3).indices.tolist()) <= set(report)
            for t, p in report.items():
                assert p.logprob == pytest.approx(row[t].item(), abs=5e-5) and p.decoded_token == llm.tokenizer.token_text(t)
                assert p.rank == (row >= row[t]).sum()
        assert o.cumulative_logprob == pytest.approx(sum(r[t].item() for t, r in zip(o.token_ids, lp)), abs=1e-4)


@pytest.mark.parametrize('budget', [256, 3])
@pytest.mark.parametrize('length', [1, 3, 4, 5, 8, 9, 70])
def test_PC7_prompt_logprobs_with_a_cached_prompt(tiny, length, budget):
    llm = engine(tiny, max_num_batched_tokens=budget)
    want = raw_logprobs(llm.model, prompt(length))
    llm.generate([prompt(length)], greedily(1), use_tqdm=False)                     # the cache is warm
    for _ in range(2):
        [out] = llm.generate([prompt(length)], greedily(2, prompt_logprobs=1), use_tqdm=False)
        assert out.num_cached_tokens == 0 and out.prompt_logprobs[0] is None and len(out.prompt_logprobs) == length
        for p, report in enumerate(out.prompt_logprobs[1:], 1):
            assert report[prompt(length)[p]].logprob == pytest.approx(want[p-1, prompt(length)[p]].item(), abs=5e-5)
            assert min(r.rank for r in report.values()) == 1
    drained(llm)


def test_prompt_logprobs_survive_preemption(tiny):
    llm = engine(tiny, num_blocks=10)
    outs = llm.generate([prompt(8, i) for i in range(5)], greedily(20, prompt_logprobs=0), use_tqdm=False)
    assert sum(o.metrics.num_preemptions for o in outs) > 0
    for i, o in enumerate(outs):
        want = raw_logprobs(llm.model, prompt(8, i))
        assert [r[t].logprob for t, r in zip(prompt(8, i)[1:], o.prompt_logprobs[1:])] == pytest.approx([want[p, t].item() for p, t in enumerate(prompt(8, i)[1:])], abs=5e-5)


# --- the prefix cache does not show

def test_PC1_full_hit_through_the_engine(tiny):
    llm = engine(tiny)
    first, second = (llm.generate([prompt(12)], greedily(), use_tqdm=False)[0] for _ in range(2))
    assert second.outputs[0].token_ids == first.outputs[0].token_ids == greedy(llm.model, prompt(12), 8)
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 8)


def test_PC5_a_batch_that_ended_on_stops_leaves_nothing(tiny):
    cold, warm = engine(tiny, enable_prefix_caching=False), engine(tiny)
    stops = [t for t in 'abcdefgh ']
    warm.generate([prompt(10 + i % 3, i // 2) for i in range(8)], drawn(20, stop=stops), use_tqdm=False)
    prompts = [prompt(10, i) + prompt(3, 9) for i in range(4)]
    assert answers(warm, prompts, greedily()) == answers(cold, prompts, greedily())


@pytest.mark.parametrize('backend', ['torch', 'cpu'])
def test_PC6_every_split_of_hit_and_miss(tiny, backend):
    base = prompt(17)
    for cut in range(1, 18):
        llm = engine(tiny, attention_backend=backend)
        for p in (base, base, base[:cut] + prompt(5, 1), base[:cut] + prompt(6, 2)):
            assert answers(llm, [p], greedily())[0][0] == greedy(llm.model, p, 8)


@pytest.mark.parametrize('backend', ['torch', 'cpu'])
def test_PC15_every_row_of_a_ragged_batch(tiny, backend):
    llm = engine(tiny, attention_backend=backend)
    prompts = [prompt(n, n) for n in (1, 3, 4, 5, 7, 8, 9, 13, 30)]
    assert [a for [a] in answers(llm, prompts, greedily())] == [greedy(llm.model, p, 8) for p in prompts]


@pytest.mark.parametrize('chunk', [1, 4, 5, 256])
def test_SC18_prompts_around_the_chunk(tiny, chunk):
    llm = engine(tiny, max_num_batched_tokens=chunk)
    prompts = [prompt(n, n) for n in (3, 4, 5, 8, 9)]
    assert [a for [a] in answers(llm, prompts, greedily())] == [greedy(llm.model, p, 8) for p in prompts]


def test_SC20_streaming_a_prompt_of_several_chunks(tiny):
    llm = engine(tiny, max_num_batched_tokens=8)
    deltas = list(llm.stream(prompt(30), greedily(6)))
    assert [len(d.token_ids) for d in deltas] == [1] * 6


# --- refused, and the engine lives on (ids out of range: tests/test_engine.py)

def test_TX11_empty_stop(tiny):
    for stop in ('', ['a', '']):
        with pytest.raises(ValueError, match='stop must hold strings'): SamplingParams(stop=stop)
        p = SamplingParams()
        p.stop = stop                                                                   # changed after it was checked: the engine checks again
        with pytest.raises(ValueError, match='stop must hold strings'): engine(tiny).generate([prompt(4)], p, use_tqdm=False)


# --- the prompt, cut

@pytest.mark.parametrize('cache', [True, False])
def test_truncate_prompt_tokens(tiny, cache):
    llm = engine(tiny, max_model_len=32, enable_prefix_caching=cache)
    for length, keep, kept in [(20, 5, 5), (20, 20, 20), (3, 5, 3), (60, 9, 9), (60, -1, 31), (8, -1, 8)]:
        n = min(8, 32 - kept)
        [out] = llm.generate([prompt(length)], greedily(n, truncate_prompt_tokens=keep, prompt_logprobs=0), use_tqdm=False)
        assert out.prompt_token_ids == prompt(length)[-kept:] and len(out.prompt_logprobs) == kept
        assert out.outputs[0].token_ids == greedy(llm.model, prompt(length)[-kept:], n)
    with pytest.raises(ValueError, match='at most 31 fit'): llm.generate([prompt(60)], greedily(truncate_prompt_tokens=40), use_tqdm=False)
    drained(llm)


# --- text, as it streams

def saying(tiny, monkeypatch, text, after=(), **kw):
    "Deltas and answer of a model that says `text` and then 5 for ever."
    ids = engine(tiny).tokenizer.encode(text)
    llm = eos_engine(tiny, monkeypatch, ids)
    deltas = list(llm.stream(list(after) or prompt(4), greedily(**dict(n=len(ids)) | kw)))
    assert ''.join(d.text for d in deltas) == deltas[-1].output.outputs[0].text
    assert sum(len(d.token_ids) for d in deltas) == len(deltas[-1].output.outputs[0].token_ids)
    return deltas, deltas[-1].output.outputs[0]


def test_TX1_prompt_ends_inside_a_character(tiny, monkeypatch):
    llm = engine(tiny)
    byte = {llm.tokenizer.token_bytes(i): i for i in range(4, 260)}
    a, b, c = (byte[bytes([x])] for x in '从'.encode())
    deltas, o = saying(tiny, monkeypatch, 'x', after=[*llm.tokenizer.encode('Once'), a, b])
    assert 'Once' not in o.text and '\ufffd' not in o.text and o.text == 'x'
    llm = eos_engine(tiny, monkeypatch, [c, byte[b'y']])
    [out] = llm.generate([[*llm.tokenizer.encode('Once'), a, b]], greedily(2), use_tqdm=False)
    assert out.outputs[0].text == '从y'


def test_TX3_cut_inside_a_character(tiny, monkeypatch):
    _, o = saying(tiny, monkeypatch, 'ab🙂', n=4)                                       # 2 letters and 2 of 4 bytes
    assert (o.text, o.finish_reason, len(o.token_ids)) == ('ab\ufffd', 'length', 4)


def test_TX4_every_character_once_and_whole(tiny, monkeypatch):
    text = 'é从🙂👨‍👩‍👧 naïve Ω'
    deltas, o = saying(tiny, monkeypatch, text)
    assert o.text == text and not any('\ufffd' in d.text for d in deltas)


def test_TX6_ascii_comes_at_once(tiny, monkeypatch):
    deltas, _ = saying(tiny, monkeypatch, 'Plain words, one by one.')
    assert all(d.text for d in deltas)


def test_TX9_holds_back_only_what_may_become_a_stop(tiny, monkeypatch):
    deltas, o = saying(tiny, monkeypatch, 'Z1Z2Z', stop=['Z' * 40, '1' * 30 + 'x', '<end of text>'])
    assert o.text == 'Z1Z2Z' and [d.text for d in deltas] == ['', 'Z', '1', 'Z2', 'Z']


# --- what the model's makers ask for

def with_generation_config(tiny, tmp_path, **config):
    import json
    import shutil
    folder = shutil.copytree(tiny, tmp_path/'model', dirs_exist_ok=True)
    (folder/'generation_config.json').write_text(json.dumps(config))
    return folder


def test_generation_defaults_are_honored(tiny, tmp_path, caplog):
    llm = engine(with_generation_config(tiny, tmp_path, eos_token_id=[2, 7], do_sample=True, temperature=.5, top_k=3, top_p=.9, min_p=.05, repetition_penalty=1.3, max_new_tokens=11,
                                        min_new_tokens=2, stop_strings='END', num_beams=1, transformers_version='5.0.0', pad_token_id=3, typical_p=1.0, max_length=512))
    assert llm.default_params() == SamplingParams(temperature=.5, top_k=3, top_p=.9, min_p=.05, repetition_penalty=1.3, max_tokens=11, min_tokens=2, stop=['END'])
    assert llm.eos_ids == {2, 7} and not caplog.records
    ours = llm.generate([prompt(5)], use_tqdm=False)[0].outputs[0]
    assert 2 <= len(ours.token_ids) <= 11
    assert answers(llm, [prompt(6)], greedily()) == [[greedy(llm.model, prompt(6), 8)]]  # who brings parameters gets those, not a mixture


def test_generation_defaults_without_sampling_are_greedy(tiny, tmp_path):
    llm = engine(with_generation_config(tiny, tmp_path, eos_token_id=2, do_sample=False, temperature=.7, max_new_tokens=8))
    assert llm.default_params() == SamplingParams(temperature=0, max_tokens=8)


def test_other_generation_defaults_are_reported_once(tiny, tmp_path, caplog):
    llm = engine(with_generation_config(tiny, tmp_path, eos_token_id=[2, -1, 300], num_beams=4, suppress_tokens=[1, 2], forced_bos_token_id=0, bad_words_ids=[[5]], top_p=7, max_length=20,
                                        no_repeat_ngram_size=0, use_cache=True))
    [record] = caplog.records
    said = record.getMessage()
    assert '\n' not in said and all(w in said for w in ('num_beams=4', 'suppress_tokens=[1, 2]', 'forced_bos_token_id=0', 'bad_words_ids=[[5]]', 'top_p=7', 'max_length=20', 'eos_token_id=[-1, 300]'))
    assert 'use_cache' not in said and 'no_repeat' not in said
    assert llm.eos_ids == {2} and llm.default_params() == SamplingParams()
    llm.generate([prompt(5)], SamplingParams(min_tokens=3, max_tokens=5), use_tqdm=False)
    assert len(caplog.records) == 1
