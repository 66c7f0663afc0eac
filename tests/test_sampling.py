"SamplingParams, the counter-based random numbers and the sampler; the SA rows that need no engine."
import random
from types import SimpleNamespace
import pytest, torch
from hypothesis import given, settings, strategies as st
from transformers.generation import logits_process as hf
from minivllm.sampler import Sampler, add_bias, cut, draw, greedy, largest, mask_tokens, penalize, prompt_logprobs, shape, top_k_floor, top_p_floor
from minivllm.sampling import SamplingParams, child_seed, philox4x32, uniform
from minivllm.sequence import Sequence

V, INF = 60, float('inf')

def seq(prompt=(1, 2, 3), output=(), seed=0, stop_ids=(), **kw):
    s = Sequence('s', list(prompt), SamplingParams(**kw), seed=seed, stop_ids=frozenset(stop_ids))
    for t in output: s.append_token(t, 0.)
    return s

def random_logits(n, v=V, seed=0, scale=3.): return torch.randn(n, v, generator=torch.Generator().manual_seed(seed)) * scale

def penalized(logits, seqs):
    "Steps 2-6"
    x = logits.clone()
    mask_tokens(x, seqs); add_bias(x, seqs); penalize(x, seqs)
    return x

def weights(logits, seqs):
    "Steps 2-10"
    return shape(penalized(logits, seqs), [s.params for s in seqs])

def close(weights, logits):
    "Are these weights those of these processed logits? (Logits mean the same after adding a constant to a row.)"
    best = logits.amax(-1, keepdim=True)
    kept = weights > 0
    assert torch.equal(kept, logits.isfinite())
    assert torch.allclose(weights.log()[kept], (logits - best)[kept], rtol=1e-5, atol=1e-5)

# --- equality with transformers, each alone and combined ---

def hf_chain(s):
    "transformers' processors for the steps it has, in the documented order"
    p, chain = s.params, []
    if p.bad_words: chain.append(hf.NoBadWordsLogitsProcessor(p.bad_words_token_ids, eos_token_id=-1))
    if p.min_tokens: chain.append(hf.MinNewTokensLengthLogitsProcessor(s.num_prompt_tokens, p.min_tokens, sorted(s.stop_ids)))
    if p.logit_bias: chain.append(hf.SequenceBiasLogitsProcessor([[[t], b] for t, b in p.logit_bias.items()]))
    if p.repetition_penalty != 1: chain.append(hf.RepetitionPenaltyLogitsProcessor(p.repetition_penalty))
    if p.temperature != 1: chain.append(hf.TemperatureLogitsWarper(p.temperature))
    if p.min_p: chain.append(hf.MinPLogitsWarper(p.min_p))
    if p.top_k > 0: chain.append(hf.TopKLogitsWarper(p.top_k))
    if p.top_p < 1: chain.append(hf.TopPLogitsWarper(p.top_p))
    return chain

ALONE = [dict(temperature=.5), dict(temperature=1.7), dict(top_k=1), dict(top_k=7), dict(top_k=V), dict(top_k=10 * V), dict(top_p=.1), dict(top_p=.5), dict(top_p=.95), dict(min_p=.05), dict(min_p=.5),
         dict(min_p=1.), dict(repetition_penalty=1.3), dict(repetition_penalty=.7), dict(logit_bias={3: 5., 50: -7.}), dict(min_tokens=9)]
TOGETHER = [dict(temperature=.8, top_k=10, top_p=.9), dict(temperature=1.5, min_p=.1, top_p=.7), dict(repetition_penalty=1.2, temperature=.6, top_k=20, top_p=.8, min_p=.02, logit_bias={4: 3.}, min_tokens=7)]

@pytest.mark.parametrize('kw', ALONE + TOGETHER, ids=str)
def test_equals_transformers(kw):
    logits = random_logits(16)
    rng = random.Random(1)
    seqs = [seq([rng.randrange(V) for _ in range(8)], [rng.randrange(V) for _ in range(5)], stop_ids=[0, 7], **kw) for _ in range(16)]
    mine = weights(logits, seqs)
    for x, s, m in zip(logits, seqs, mine):
        x, ids = x[None].clone(), torch.tensor([s.token_ids])
        for f in hf_chain(s): x = f(ids, x)
        close(m[None], x)

def test_all_mixes_in_one_batch_equal_transformers():
    rng, seqs = random.Random(2), []
    for kw in ALONE + TOGETHER: seqs.append(seq([rng.randrange(V) for _ in range(8)], [rng.randrange(V) for _ in range(5)], stop_ids=[0, 7], **kw))
    logits = random_logits(len(seqs))
    for x, s, m in zip(logits, seqs, weights(logits, seqs)):
        x = x[None].clone()
        for f in hf_chain(s): x = f(torch.tensor([s.token_ids]), x)
        close(m[None], x)

def test_bad_words_equal_transformers():
    s = seq([1, 2], [4, 5, 6], bad_words=['x'])
    s.params.bad_words_token_ids = [[9], [6, 10], [5, 6, 11], [4, 6, 12], [2, 4, 5, 6, 13]]
    mine = weights(random_logits(1), [s])
    ref = hf.NoBadWordsLogitsProcessor([[9], [6, 10], [5, 6, 11], [4, 6, 12]], eos_token_id=-1)(torch.tensor([s.output_token_ids]), random_logits(1))
    close(mine, ref)

def test_allowed_token_ids():
    x = penalized(random_logits(2), [seq(allowed_token_ids=[3, 5]), seq()])
    assert x[0].isfinite().nonzero()[:, 0].tolist() == [3, 5] and torch.equal(x[1], random_logits(2)[1])

def test_presence_and_frequency_by_the_formula():
    logits = random_logits(1)
    x = weights(logits, [seq([1, 2, 3], [3, 4, 4], presence_penalty=.5, frequency_penalty=.25)])
    want = logits.clone()
    want[0, 3] -= .5 + .25
    want[0, 4] -= .5 + .5
    close(x, want)

def test_penalties_of_repeated_stop_and_biased_tokens_combine():
    logits = random_logits(1)
    s = seq([1, 9], [4, 4, 7], repetition_penalty=1.5, frequency_penalty=.5, presence_penalty=-1, logit_bias={4: 2., 8: -2.})
    want = logits.clone()
    want[0, 4] += 2; want[0, 8] -= 2
    want = hf.RepetitionPenaltyLogitsProcessor(1.5)(torch.tensor([[1, 9, 4, 4, 7]]), want)
    want[0, 4] -= .5 * 2 - 1; want[0, 7] -= .5 - 1
    close(weights(logits, [s]), want)

def test_masks_that_leave_nothing():
    logits = random_logits(3)
    s = seq(allowed_token_ids=[5], min_tokens=4, stop_ids=[5], temperature=0)
    t = seq(allowed_token_ids=[5, 6], min_tokens=4, stop_ids=[5], temperature=1)
    u = seq(temperature=1, bad_words=['x'])
    u.params.bad_words_token_ids = [[i] for i in range(V)]
    ids = Sampler()(logits, [s, t, u]).token_ids
    assert ids[:2] == [5, 6] and 0 <= ids[2] < V

# --- log-probabilities ---

@pytest.mark.parametrize('kw', [dict(temperature=0), dict(temperature=.7, top_k=3, repetition_penalty=2., logit_bias={1: 100})], ids=str)
@pytest.mark.parametrize('k', [0, 1, 5, -1])
def test_logprobs_are_a_log_softmax_of_the_raw_logits(kw, k):
    logits = random_logits(4)
    out = Sampler()(logits, [seq(seed=i, logprobs=k, **kw) for i in range(4)])
    ref = torch.log_softmax(logits.double(), -1)
    for row, token, report in zip(ref, out.token_ids, out.logprobs):
        top = row.topk(V if k < 0 else k).indices.tolist()
        assert next(iter(report)) == token and set(report) == {token, *top}
        for t, l in report.items():
            assert abs(l.logprob - row[t].item()) < 1e-5 and l.rank == 1 + (row > row[t]).sum() and l.decoded_token is None
    assert Sampler()(logits, [seq(**kw)] * 4).logprobs == [None] * 4

def test_logprobs_do_not_depend_on_what_neighbors_ask():
    logits = random_logits(3).bfloat16().float() # many equal values
    logits[0] = logits[0].round()
    alone = Sampler()(logits[:1], [seq(temperature=0, logprobs=5)]).logprobs[0]
    mixed = Sampler()(logits, [seq(temperature=0, logprobs=5), seq(logprobs=20), seq()]).logprobs
    assert mixed[0] == alone and list(mixed[0]) == list(alone) and mixed[2] is None and 20 <= len(mixed[1]) <= 21

def test_prompt_logprobs():
    logits, ids = random_logits(6), [4, 8, 15, 16, 23, 42]
    ref = torch.log_softmax(logits.double(), -1)
    for k in (0, 2, -1):
        whole, parts = prompt_logprobs(logits, ids, k), prompt_logprobs(logits[:2], ids[:2], k) + prompt_logprobs(logits[2:], ids[2:], k)
        assert whole == parts # in chunks as at once
        for row, t, report in zip(ref, ids, whole): assert abs(report[t].logprob - row[t].item()) < 1e-5 and next(iter(report)) == t

# --- the distribution ---

MIXES = [ # parameters, number of tokens they keep, critical value of chi-squared at 0.1 % for that number less one
    (dict(), 60, 98.3242),
    (dict(temperature=.7, top_k=10), 10, 27.8772),
    (dict(top_p=.8), 31, 59.7031),
    (dict(temperature=1.5, min_p=.2), 30, 58.3012),
    (dict(temperature=1.2, repetition_penalty=1.3, presence_penalty=.4, frequency_penalty=.2, logit_bias={7: 1.5}, top_k=30, top_p=.95, min_p=.01), 27, 54.052)]

@pytest.mark.parametrize('kw, kept, critical', MIXES, ids=str)
def test_chi_squared_of_20000_draws(kw, kept, critical):
    logits, params = random_logits(1, seed=3, scale=1.), SamplingParams(**kw)
    exact = weights(logits, [seq([1, 2], [2, 3, 3], **kw)])[0].double()
    exact /= exact.sum()
    one = lambda seed, position: SimpleNamespace(params=params, prompt_token_ids=[1, 2], output_token_ids=[2, 3, 3], num_output_tokens=position, seed=seed, stop_ids=frozenset())
    seqs = [one(seed, position) for seed in range(40) for position in range(500)]
    drawn = torch.tensor(Sampler()(logits.expand(20_000, V), seqs).token_ids).bincount(minlength=V)
    expected = 20_000 * exact[exact > 0]
    assert (exact > 0).sum() == kept and expected.min() > 5 and drawn[exact == 0].sum() == 0
    chi2 = ((drawn[exact > 0] - expected) ** 2 / expected).sum().item()
    assert chi2 < critical

def test_exact_distribution_of_the_mixes_is_that_of_transformers():
    for kw, kept, _ in MIXES[:4]:
        x, s = random_logits(1, seed=3, scale=1.), seq([1, 2], [2, 3, 3], **kw)
        for f in hf_chain(s): x = f(torch.tensor([s.token_ids]), x)
        assert x.isfinite().sum() == kept

# --- random numbers ---

@pytest.mark.parametrize('counter, key, out', [
    ('00000000 00000000 00000000 00000000', '00000000 00000000', '6627e8d5 e169c58d bc57ac4c 9b00dbd8'),
    ('ffffffff ffffffff ffffffff ffffffff', 'ffffffff ffffffff', '408f276d 41c83b0e a20bc7c6 6d5451fd'),
    ('243f6a88 85a308d3 13198a2e 03707344', 'a4093822 299f31d0', 'd16cfe09 94fdcceb 5001e420 24126ea1')])
def test_philox_known_answers(counter, key, out):
    words = lambda s: tuple(int(w, 16) for w in s.split())
    assert philox4x32(words(counter), words(key)) == words(out)

@given(st.integers(-2**63, 2**64 - 1), st.integers(0, 2**40))
def test_uniform_is_in_range_and_repeatable(seed, position):
    assert 0 <= uniform(seed, position) < 1 and uniform(seed, position) == uniform(seed, position)

def test_child_seeds_are_streams_of_their_own():
    assert child_seed(5, 0) == 5
    streams = {tuple(uniform(child_seed(s, i), p) for p in range(4)) for s in range(20) for i in range(10)}
    assert len(streams) == 200

def test_draw_at_the_ends():
    x = torch.tensor([[0., 1., 0., 1., 0.]])
    assert draw(x, [0.]).tolist() == [1] and draw(x, [1 - 2**-53]).tolist() == [3]
    wide = torch.full((1, 49152), 2e-9); wide[0, 0] = 1.
    assert draw(wide, [1 - 2**-53]).tolist() == [49151] # a tail of 1e-4 in 49151 parts is reached

# --- independence of the batch ---

def random_seq(rng):
    p = dict(temperature=rng.choice([0, 0, .5, 1, 2]), top_k=rng.choice([0, 3, 50]), top_p=rng.choice([.5, .99, 1]), min_p=rng.choice([0, .1]), min_tokens=rng.choice([0, 8]),
             repetition_penalty=rng.choice([1, 1.2]), presence_penalty=rng.choice([0, 1]), logit_bias=rng.choice([None, {5: 2}]), allowed_token_ids=rng.choice([None, [1, 2, 3, 9]]),
             logprobs=rng.choice([None, 0, 3, 20]))
    return seq([rng.randrange(V) for _ in range(rng.randrange(1, 9))], [rng.randrange(V) for _ in range(rng.randrange(9))], rng.randrange(99), [0, 2], **p)

@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 12))
def test_a_row_does_not_depend_on_its_neighbors(seed, n):
    rng = random.Random(seed)
    seqs, logits = [random_seq(rng) for _ in range(n)], random_logits(n, seed=seed)
    before = logits.clone()
    batch = Sampler()(logits, seqs)
    assert torch.equal(logits, before) # the model's logits are left alone
    for i in range(n):
        alone = Sampler()(logits[i:i+1], seqs[i:i+1])
        assert (alone.token_ids[0], alone.logprobs[0]) == (batch.token_ids[i], batch.logprobs[i])

@pytest.fixture(params=[1, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)

@pytest.mark.parametrize('size', [49152, 50257, 32000])
def test_real_vocabulary_rows_are_equal_to_the_bit(size, threads):
    logits = random_logits(8, size)
    kws = [dict(top_p=.9), dict(top_p=.999, temperature=2), dict(min_p=.01), dict(top_k=40), dict(), dict(temperature=.3, top_p=.5, top_k=5000), dict(repetition_penalty=1.1, logprobs=5), dict(temperature=0, logprobs=0)]
    seqs = [seq(seed=i, **kw) for i, kw in enumerate(kws)]
    both, shaped = Sampler()(logits, seqs), weights(logits[:7], seqs[:7])
    for i in range(8):
        alone = Sampler()(logits[i:i+1], seqs[i:i+1])
        assert (alone.token_ids[0], alone.logprobs[0]) == (both.token_ids[i], both.logprobs[i])
        if i < 7: assert torch.equal(weights(logits[i:i+1], seqs[i:i+1])[0], shaped[i])

def test_top_p_is_the_same_for_every_width():
    w, ps = random_logits(5, 500).softmax(-1), [.1, .5, .9, .999, 1]
    want = top_p_floor(w, ps, width=500)
    for width in (1, 2, 7, 64, 1000): assert torch.equal(top_p_floor(w, ps, width=width), want)

def test_equal_logits_stay_or_go_together():
    w = torch.tensor([[1., .5, 1., .5, 0.]])
    for floor in (top_k_floor(w, [1]), top_p_floor(w, [.5])): assert cut(w, floor).tolist() == [[1, 0, 1, 0, 0]]

@pytest.mark.parametrize('size', [1, 60, 257, 1024, 7680])
def test_greedy_and_largest_equal_argmax_and_topk(size):
    for x in (random_logits(9, size), random_logits(9, size).round()): # few and many equal values
        assert torch.equal(greedy(x), x.argmax(-1))
        for k in {1, min(2, size), size // 3 + 1, size}:
            values, ids = largest(x, k)
            assert torch.equal(values, x.topk(k).values) and torch.equal(x.gather(1, ids), values) and all(len(set(r)) == k for r in ids.tolist())

def test_plain_greedy_batch_needs_nothing_but_parameters():
    p = SamplingParams(temperature=0)
    logits = random_logits(5)
    out = Sampler()(logits, [SimpleNamespace(params=p)] * 5)
    assert out.token_ids == logits.argmax(-1).tolist() and out.logprobs == [None] * 5
    assert Sampler()(logits[:0], []).token_ids == []

# --- the rows of cases.md that need no engine ---

def generate(logits_of, s, n, neighbors=(), place=0):
    "n tokens for s, from a table of logits, with other sequences in the batch"
    for _ in range(n):
        seqs = [*neighbors[:place], s, *neighbors[place:]]
        rows = torch.stack([logits_of(q) for q in seqs])
        for q, t in zip(seqs, Sampler()(rows, seqs).token_ids): q.append_token(t, 0.)
    return s.output_token_ids

def table(s): return random_logits(1, seed=1000 + s.token_ids[-1])[0]

def test_SA1_seeded_row_is_the_same_with_any_neighbors():
    alone = generate(table, seq(seed=42), 12)
    for place in range(4):
        others = [seq([9], seed=7), seq([8], temperature=0, logprobs=2), seq([7], top_p=.5, seed=1)]
        assert generate(table, seq(seed=42), 12, others, place) == alone
    assert generate(table, seq(seed=43), 12) != alone

def test_SA3_draws_go_on_after_a_restart():
    whole = generate(table, seq(seed=42), 12)
    resumed = seq(seed=42, output=whole[:5]) # as after a preemption: only the tokens are left
    assert generate(table, resumed, 7) == whole

def test_SA5_copies_have_streams_of_their_own():
    texts = [tuple(generate(table, seq(seed=child_seed(3, i)), 12)) for i in range(4)]
    assert len(set(texts)) == 4 and texts == [tuple(generate(table, seq(seed=child_seed(3, i)), 12)) for i in range(4)]

def test_SA8_penalty_does_not_depend_on_the_order():
    logits = random_logits(2)
    a, b = seq([3, 4], [5], repetition_penalty=2), seq([3, 4], [5])
    x, y = penalized(logits, [a, b]), penalized(logits.flip(0), [b, a])
    assert torch.equal(x[0], y[1]) and torch.equal(x[1], y[0]) and torch.equal(x[1], logits[1])

def test_SA9_repetition_sees_the_prompt_the_others_do_not():
    logits = torch.ones(3, V)
    s = [seq([6, 6], [], **{k: 1.5}) for k in ('repetition_penalty', 'presence_penalty', 'frequency_penalty')]
    x = penalized(logits, s)
    assert abs(x[0, 6] - 1 / 1.5) < 1e-6 and (x[0] != 1).sum() == 1 and torch.equal(x[1:], logits[1:])

def test_SA11_the_whole_history_counts():
    output = list(range(10, 40))
    x = penalized(torch.ones(1, V), [seq([1], output, repetition_penalty=2)])
    assert (x[0] == .5).nonzero()[:, 0].tolist() == [1] + output

@pytest.mark.parametrize('temperature', [1e-3, 1e-4, 1e-5, 1e-6, 1e-30])
@pytest.mark.parametrize('scale', [1, 1e4])
def test_SA12_tiny_temperatures_are_greedy(temperature, scale):
    logits = random_logits(16, scale=scale)
    top = logits.topk(2).values
    logits[(top[:, 0] - top[:, 1]) < .05] *= 100 # no near-ties
    for kw in ({}, dict(top_p=.9), dict(top_k=5), dict(min_p=.1)):
        seqs = [seq(seed=i, temperature=temperature, **kw) for i in range(16)]
        if not seqs[0].params.is_greedy: assert weights(logits, seqs).isfinite().all()
        assert Sampler()(logits, seqs).token_ids == logits.argmax(-1).tolist()

def test_SA14_greedy_and_random_rows_together():
    logits = random_logits(40)
    ids = Sampler()(logits, [seq(seed=i, temperature=i % 2) for i in range(40)]).token_ids
    best = logits.argmax(-1).tolist()
    assert ids[::2] == best[::2] and ids[1::2] != best[1::2]

@pytest.mark.parametrize('temperature', [0, 1])
def test_SA16_min_tokens_then_eos(temperature):
    s = seq(stop_ids=[9], logit_bias={9: 100}, min_tokens=4, temperature=temperature)
    out = generate(table, s, 5)
    assert 9 not in out[:4] and out[4] == 9

def test_SA20_token_ids_out_of_range():
    for bad in ({-1: 1}, {'abc': 1}, {1.5: 1}, {True: 1}):
        with pytest.raises(ValueError, match='logit_bias'): SamplingParams(logit_bias=bad)
    for kw in (dict(logit_bias={V: 1}), dict(allowed_token_ids=[V]), dict(stop_token_ids=[V]), dict(logprobs=V + 1), dict(prompt_logprobs=V + 1)):
        with pytest.raises(ValueError, match=f'{next(iter(kw))} must .*vocabulary size {V}'): SamplingParams(**kw).verify(V)
    SamplingParams(logit_bias={V - 1: 1, '0': 2}, logprobs=V).verify(V)

# --- parameters ---

DEFAULTS = dict(n=1, presence_penalty=0., frequency_penalty=0., repetition_penalty=1., temperature=1., top_p=1., top_k=0, min_p=0., seed=None, stop=[], stop_token_ids=[], ignore_eos=False,
                max_tokens=16, min_tokens=0, logprobs=None, prompt_logprobs=None, skip_special_tokens=True, include_stop_str_in_output=False, truncate_prompt_tokens=None, logit_bias=None,
                allowed_token_ids=None, bad_words=[])

def test_defaults_are_those_of_vllm():
    p = SamplingParams()
    assert {k: getattr(p, k) for k in DEFAULTS} == DEFAULTS

NAN = float('nan')
@pytest.mark.parametrize('kw, value_range', [
    *[({k: v}, '[1, 16384]') for k, v in [('n', 0), ('n', 1.5), ('n', True), ('n', 16385)]],
    *[({k: v}, '[-2, 2]') for k in ('presence_penalty', 'frequency_penalty') for v in (2.1, -3, NAN, '1', None)],
    *[({'repetition_penalty': v}, '[0.001, 1000]') for v in (0, -1, 1e-300, 1001, NAN, INF)], *[({'temperature': v}, '[0, inf)') for v in (-.1, NAN, INF, '0', None, True)],
    *[({'top_p': v}, '(0, 1]') for v in (0, 1.01, -1, NAN)], *[({'top_k': v}, 'at least -1') for v in (-2, 2.5, '3')], *[({'min_p': v}, '[0, 1]') for v in (-.1, 1.1)],
    *[({'seed': v}, 'seed must be an integer in') for v in (1.5, 2**64, -2**63 - 1, 'a')], *[({'max_tokens': v}, 'at least 0') for v in (-1, 2.)], ({'max_tokens': 0, 'n': 2}, 'n must be 1'),
    *[({'min_tokens': v}, '[0, 16]') for v in (-1, 17)], *[({k: v}, 'at least -1') for k in ('logprobs', 'prompt_logprobs') for v in (-2, 1.5, True)],
    *[({'truncate_prompt_tokens': v}, 'at least 1') for v in (0, -2)], *[({k: 1}, 'True or False') for k in ('ignore_eos', 'skip_special_tokens', 'include_stop_str_in_output')],
    *[({k: v}, 'at least one character') for k in ('stop', 'bad_words') for v in ('', [''], ['a', ''], [3])],
    *[({k: v}, k) for k in ('stop_token_ids', 'allowed_token_ids') for v in ([-1], ['1'], 5, '12')], ({'allowed_token_ids': []}, 'at least one id'),
    *[({'logit_bias': v}, 'logit_bias') for v in ({0: 101}, {0: NAN}, {0: 'a'}, [1])]], ids=str)
def test_refusals_name_field_and_range(kw, value_range):
    with pytest.raises(ValueError) as e: SamplingParams(**kw)
    assert next(iter(kw)) in str(e.value) and value_range in str(e.value) and '\n' not in str(e.value)

def test_accepted_spellings():
    import numpy as np
    assert SamplingParams(stop='a').stop == ['a'] and SamplingParams(stop=('a', 'b', 'a')).stop == ['a', 'b']
    assert SamplingParams(top_k=np.int64(5), temperature=np.float32(.5), seed=np.int64(3)) == SamplingParams(top_k=5, temperature=.5, seed=3)
    assert SamplingParams(seed=-1).seed is None and SamplingParams(top_k=-1).top_k == -1 and SamplingParams(max_tokens=None, min_tokens=99).min_tokens == 99

def test_clone_is_independent_and_checked():
    p = SamplingParams(stop=['a'], logit_bias={1: 2}, bad_words=['x'])
    p.bad_words_token_ids = [[3]]
    q = p.clone()
    assert q == p and q.bad_words_token_ids == [[3]]
    q.stop.append('b'); q.logit_bias[2] = 1
    assert p.stop == ['a'] and p.logit_bias == {1: 2}
    p.top_p = 5
    with pytest.raises(ValueError, match='top_p'): p.clone()

def test_sampling_params_import_without_torch():
    import subprocess, sys
    code = 'import minivllm.sampling, sys; assert not {"torch", "numpy"} & set(sys.modules)'
    subprocess.run([sys.executable, '-c', code], check=True)
