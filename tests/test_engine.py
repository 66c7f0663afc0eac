"The engine on a tiny random model: limits, errors, and that nothing is left behind."
import random

import pytest

from minivllm import LLM, SamplingParams
from ref import drained, greedy, poison


def engine(tiny, **kw):
    kw = dict(dtype='float32', block_size=4, num_blocks=32) | kw
    return poison(LLM(str(tiny), **kw))


def prompt(n, seed=0): return [random.Random(seed).randrange(3, 250) for _ in range(n)]


def params(n=8, **kw): return SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, **kw)


def tokens(outs): return [o.outputs[0].token_ids for o in outs]


def test_SC1_impossible_request_is_refused_and_the_queue_goes_on(tiny):
    llm = engine(tiny, num_blocks=8)                        # 32 tokens
    with pytest.raises(ValueError, match='32'): llm.generate([prompt(4), prompt(40)], params(), use_tqdm=False)
    drained(llm)
    assert tokens(llm.generate([prompt(4)], params(), use_tqdm=False)) == [greedy(llm.model, prompt(4), 8)]


def test_SC2_max_model_len_over_the_pool(tiny):
    with pytest.raises(ValueError, match='max_model_len'): engine(tiny, num_blocks=8, max_model_len=64)
    llm = engine(tiny, num_blocks=8)
    assert llm.max_model_len == 32
    [out] = llm.generate([prompt(10)], params(100), use_tqdm=False)       # the prompt fits, prompt and answer do not
    assert len(out.outputs[0].token_ids) == 22 and out.outputs[0].finish_reason == 'length'
    drained(llm)


def test_SC2_growth_of_several_beyond_the_pool(tiny):
    llm = engine(tiny, num_blocks=8)
    prompts = [prompt(7, seed) for seed in range(4)]
    assert tokens(llm.generate(prompts, params(20), use_tqdm=False)) == [greedy(llm.model, p, 20) for p in prompts]
    drained(llm)


def test_SC4_empty_prompt(tiny):
    llm = engine(tiny)
    for bad in ('', [''], [[]], dict(prompt=''), dict(prompt_token_ids=[])):
        with pytest.raises(ValueError, match='empty'): llm.generate(bad, params(), use_tqdm=False)
    assert llm.generate([], params(), use_tqdm=False) == []      # no prompts at all: nothing to do
    drained(llm)
    assert len(tokens(llm.generate('ok', params(), use_tqdm=False))[0]) == 8


def test_SC5_prompt_over_the_token_budget_is_chunked(tiny):
    llm = engine(tiny, max_num_batched_tokens=8)
    assert tokens(llm.generate([prompt(50)], params(), use_tqdm=False)) == [greedy(llm.model, prompt(50), 8)]


def test_SC6_prompt_of_exactly_the_limit(tiny):
    llm = engine(tiny, max_model_len=24)
    with pytest.raises(ValueError, match='at most 23 fit'): llm.generate([prompt(24)], params(1), use_tqdm=False)
    [out] = llm.generate([prompt(23)], params(5), use_tqdm=False)
    assert len(out.outputs[0].token_ids) == 1 and out.outputs[0].finish_reason == 'length'
    drained(llm)


def test_SC8_near_the_limit_gives_what_fits(tiny):
    llm = engine(tiny, max_model_len=24)
    [out] = llm.generate([prompt(20)], params(100), use_tqdm=False)
    assert out.outputs[0].token_ids == greedy(llm.model, prompt(20), 4) and out.outputs[0].finish_reason == 'length'


def test_SC9_no_limit_and_no_end(tiny):
    llm = engine(tiny, max_model_len=40)
    [out] = llm.generate([prompt(5)], SamplingParams(temperature=0, max_tokens=None, ignore_eos=True), use_tqdm=False)
    assert len(out.outputs[0].token_ids) == 35 and out.outputs[0].finish_reason == 'length'


@pytest.mark.parametrize('bad', [[-1], [10**6], [1.5], ['a'], [True], {'prompt_token_ids': [-1]}])
def test_SA22_bad_prompt_ids(tiny, bad):
    llm = engine(tiny)
    with pytest.raises(ValueError, match=r'prompt_token_ids\[0\]|token ids'): llm.generate([bad], params(), use_tqdm=False)
    drained(llm)


@pytest.mark.parametrize('bias', [{10**6: 1.}, {-1: 1.}, {'abc': 1.}])
def test_SA20_logit_bias_out_of_range(tiny, bias):
    llm = engine(tiny)
    with pytest.raises(ValueError, match='logit_bias'): llm.generate('hi', SamplingParams(logit_bias=bias), use_tqdm=False)
    drained(llm)
    assert len(tokens(llm.generate('hi', params(), use_tqdm=False))[0]) == 8


def test_SV15_second_batch_call(tiny):
    llm = engine(tiny)
    prompts = [prompt(n, n) for n in (3, 9, 17, 4)]
    want = [greedy(llm.model, p, 8) for p in prompts]
    for _ in range(2):
        outs = llm.generate(prompts, params(), use_tqdm=False)
        assert tokens(outs) == want and [o.prompt_token_ids for o in outs] == prompts


def test_SV17_after_an_exception_the_engine_is_empty(tiny):
    llm = engine(tiny)
    with pytest.raises(ValueError): llm.generate([prompt(5), [10**6]], params(), use_tqdm=False)
    drained(llm)
    run, calls = llm.runner.run_decode, 0
    def interrupted(seqs):
        nonlocal calls
        calls += 1
        if calls == 3: raise KeyboardInterrupt
        return run(seqs)
    llm.runner.run_decode = interrupted
    with pytest.raises(KeyboardInterrupt): llm.generate([prompt(5), prompt(9)], params(), use_tqdm=False)
    llm.runner.run_decode = run
    drained(llm)
    assert tokens(llm.generate([prompt(9)], params(), use_tqdm=False)) == [greedy(llm.model, prompt(9), 8)]


def test_max_tokens_1_never_decodes(tiny):
    llm = engine(tiny)
    llm.runner.run_decode = None
    [out] = llm.generate([prompt(9)], params(1), use_tqdm=False)
    assert out.outputs[0].token_ids == greedy(llm.model, prompt(9), 1) and out.metrics.tpot is None


def test_two_streams_and_a_generate_share_an_engine(tiny):
    llm = engine(tiny)
    a, b = llm.stream(prompt(5), params(12)), llm.stream(prompt(7), params(6))
    got_a, got_b = [next(a)], [next(b)]
    [c] = llm.generate([prompt(3)], params(), use_tqdm=False)
    got_b += b
    got_a += a
    ids = lambda ds: [t for d in ds for t in d.token_ids]
    assert ids(got_a) == greedy(llm.model, prompt(5), 12) and ids(got_b) == greedy(llm.model, prompt(7), 6)
    assert c.outputs[0].token_ids == greedy(llm.model, prompt(3), 8)
    assert ''.join(d.text for d in got_a) == got_a[-1].output.outputs[0].text
    drained(llm)


def test_a_closed_stream_frees_its_blocks(tiny):
    llm = engine(tiny)
    s = llm.stream(prompt(9), params(50))
    next(s)
    s.close()
    drained(llm)
    unread = llm.stream(prompt(9), params(50))               # never started
    unread.close()
    drained(llm)


def test_wrong_number_of_params_queues_nothing(tiny):
    llm = engine(tiny)
    with pytest.raises(ValueError, match='2 prompts and 1 sampling_params'): llm.generate(['a', 'b'], [params()], use_tqdm=False)
    drained(llm)


def test_closed_engine_says_so(tiny):
    with engine(tiny) as llm: pass
    with pytest.raises(RuntimeError, match='closed'): llm.generate('a', params(), use_tqdm=False)
