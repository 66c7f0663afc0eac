"The timeline of an engine: its books balance, its tracks are sound, and it leaves nothing behind."
import gc
import json
import random
import threading
import weakref

import pytest

from minivllm import LLM, SamplingParams
from minivllm.block_manager import BlockManager
from minivllm.scheduler import Request, Scheduler, policies
from minivllm.timeline import StepTime, Timeline, fit_nonnegative, simulate_timeline
from ref import drained


def engine(tiny, **kw): return LLM(str(tiny), **(dict(dtype='float32', block_size=4, num_blocks=64) | kw))


def prompt(n, seed=0): return [random.Random(seed).randrange(3, 250) for _ in range(n)]


def params(max_tokens=8, **kw): return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **kw)


def fed(llm):
    "Counts the tokens that the model is really given"
    counts, runner = dict(prefill=0, decode=0), llm.runner
    prefill, decode = runner.run_prefill, runner.run_decode
    def run_prefill(scheduled, *a):
        counts['prefill'] += sum(n for _, n in scheduled)
        return prefill(scheduled, *a)
    def run_decode(seqs):
        counts['decode'] += len(seqs)
        return decode(seqs)
    runner.run_prefill, runner.run_decode = run_prefill, run_decode
    return counts


def check(t):
    "What is true of every timeline"
    steps = list(t.steps)
    assert all(s.end >= s.start for s in steps) and all(a.end <= b.start + 1e-9 for a, b in zip(steps, steps[1:]))
    for s in steps:
        assert s.num_tokens == sum(s.prefill.values()) + len(s.decode)
        assert s.kind == ('mixed' if s.prefill and s.decode else 'prefill' if s.prefill else 'decode' if s.decode else 'empty')
        assert 0 <= s.kv_usage <= 1 and s.running >= 0 and s.waiting >= 0
        assert len(set(s.sampled)) == len(s.sampled) and set(s.decode) <= set(s.sampled)
    tracks = t.spans()
    for spans in tracks.values():
        assert all(s.end > s.start for s in spans)
        assert all(a.end <= b.start + 1e-9 for a, b in zip(spans, spans[1:])), 'a request was in two states at once'
        assert not any(a.kind == b.kind == 'stalled' for a, b in zip(spans, spans[1:]))
    assert sum(s.tokens for spans in tracks.values() for s in spans) == sum(s.num_tokens for s in steps)
    check_trace(t.trace())
    t._repr_html_()


def check_trace(trace):
    "The fields that the trace event format asks for, and tracks on which nothing overlaps"
    events = json.loads(json.dumps(trace, allow_nan=False))['traceEvents']
    for e in events:
        assert e['ph'] in 'XCM' and isinstance(e['name'], str) and all(isinstance(e[k], int) for k in ('ts', 'pid', 'tid')) and e['ts'] >= 0
        if e['ph'] == 'X': assert isinstance(e['dur'], int) and e['dur'] >= 0
        if e['ph'] == 'C': assert e['args'] and all(isinstance(v, (int, float)) for v in e['args'].values())
        if e['ph'] == 'M': assert e['name'] in ('process_name', 'thread_name') and isinstance(e['args']['name'], str)
    timed = [e for e in events if e['ph'] != 'M']
    assert [e['ts'] for e in timed] == sorted(e['ts'] for e in timed)
    named, ends = {(e['pid'], e['tid']) for e in events if e['name'] == 'thread_name'}, {}
    for e in timed:
        if e['ph'] != 'X': continue
        track = e['pid'], e['tid']
        assert track in named and e['ts'] >= ends.get(track, 0)
        ends[track] = e['ts'] + e['dur']


def test_the_books_balance(tiny):
    llm = engine(tiny, max_num_batched_tokens=24)
    counts = fed(llm)
    prompts = [prompt(5 + 7*i % 30, i) for i in range(9)]
    with llm.record_timeline() as t: outs = llm.generate(prompts, [params(1 + i) for i in range(9)], use_tqdm=False)
    check(t)
    assert sum(s.work.prefill_tokens for s in t.steps) == counts['prefill'] == sum(len(o.prompt_token_ids) - o.num_cached_tokens for o in outs)
    assert sum(s.work.decodes for s in t.steps) == counts['decode'] == sum(len(o.outputs[0].token_ids) - 1 for o in outs)
    assert {life.seq_id: len(x) for life, x in t.token_times().items()} == {f'{o.request_id}/0': len(o.outputs[0].token_ids) for o in outs}
    drained(llm)


def test_cached_prompt_tokens_are_not_in_the_steps(tiny):
    llm = engine(tiny)
    llm.generate([prompt(20)], params(2), use_tqdm=False)
    with llm.record_timeline() as t: [out] = llm.generate([prompt(20)], params(2), use_tqdm=False)
    assert out.num_cached_tokens == 16 and [s.num_tokens for s in t.steps] == [4, 1]
    assert t.steps[0].work.prefill_pairs == 17 + 18 + 19 + 20 and t.steps[0].work.prefill_reads == 20


def test_times_are_those_of_the_request(tiny):
    llm = engine(tiny, max_num_batched_tokens=8)
    with llm.record_timeline() as t: outs = llm.generate([prompt(9, i) for i in range(3)], params(4), use_tqdm=False)
    tracks = {life.seq_id: (life, spans) for life, spans in t.spans().items()}
    for o in outs:
        life, spans = tracks[f'{o.request_id}/0']
        assert (life.arrival, life.finish, life.finish_reason) == (o.metrics.arrival_time, o.metrics.finish_time, 'length')
        assert (spans[0].kind, spans[0].start, spans[0].end) == ('waiting', o.metrics.arrival_time, o.metrics.first_scheduled_time)
        [first] = [s for s in spans if s.kind == 'prefill'][-1:]
        assert first.start < o.metrics.first_token_time <= first.end


def test_preempted_requests_show_it(tiny):
    llm = engine(tiny, num_blocks=10, enable_prefix_caching=False)
    counts = fed(llm)
    with llm.record_timeline() as t: outs = llm.generate([prompt(7, i) for i in range(4)], params(20), use_tqdm=False)
    check(t)
    lost = {life.seq_id: sum(s.kind == 'preempted' for s in spans) for life, spans in t.spans().items()}
    assert lost == {f'{o.request_id}/0': o.metrics.num_preemptions for o in outs} and sum(lost.values()) > 0
    assert sum(s.num_tokens for s in t.steps) == sum(counts.values()) > sum(len(o.prompt_token_ids) + 19 for o in outs)    # read twice
    assert sum(len(s.sampled) for s in t.steps) == 4*20                                                                   # but given once


def test_several_answers_to_one_prompt(tiny):
    llm = engine(tiny, max_num_seqs=3)          # one of the four has no seat when the prompt has been read
    with llm.record_timeline() as t: [out] = llm.generate([prompt(10)], params(3, n=4), use_tqdm=False)
    check(t)
    assert sorted(len(x) for x in t.token_times().values()) == [3, 3, 3, 3] and len(t.spans()) == 4
    assert [(s.kind, s.tokens) for s in t.spans()[next(l for l in t.lives() if l.seq_id.endswith('/1'))]][:2] == [('waiting', 0), ('prefill', 0)]


def test_prompt_that_is_only_read(tiny):
    llm = engine(tiny)
    with llm.record_timeline() as t: llm.generate([prompt(10)], params(0, prompt_logprobs=1), use_tqdm=False)
    check(t)
    assert [s.num_tokens for s in t.steps] == [10] and not t.token_times() and t.decode_gaps() == []


@pytest.mark.parametrize('policy', sorted(policies))
def test_simulator_and_engine_do_the_same_steps(tiny, policy):
    sizes = [(5, 9), (40, 3), (17, 12), (3, 1), (30, 6)]
    llm = engine(tiny, max_num_batched_tokens=16, policy=policy, enable_prefix_caching=False)
    with llm.record_timeline() as real: llm.generate([prompt(n, i) for i, (n, _) in enumerate(sizes)], [params(k) for _, k in sizes], use_tqdm=False)
    scheduler = Scheduler(BlockManager(64, 4, enable_prefix_caching=False), max_num_batched_tokens=16, policy=policy)
    made_up = simulate_timeline(scheduler, [Request(n, k) for n, k in sizes])
    check(made_up)
    assert [(s.work, s.running, s.waiting, s.kv_usage) for s in made_up.steps] == [(s.work, s.running, s.waiting, s.kv_usage) for s in real.steps]


def test_simulated_timelines_are_sound():
    for seed in range(30):
        rng = random.Random(seed)
        scheduler = Scheduler(BlockManager(rng.randint(14, 40), 4, rng.random() < .5), max_num_seqs=rng.randint(1, 8), max_num_batched_tokens=rng.randint(2, 40), policy=rng.choice(sorted(policies)))
        requests = [Request(rng.randint(1, 40), rng.randint(1, 12), arrival=rng.random()*.02) for _ in range(12)]
        t = simulate_timeline(scheduler, requests)
        check(t)
        assert sum(len(s.sampled) for s in t.steps) == sum(r.num_output_tokens for r in requests)
        assert all(life.finish is not None for life in t.lives())


def test_stalled_is_what_prefill_first_does():
    requests = [Request(4, 30, seq_id='stream'), Request(64, 2, arrival=.0008)]
    def kinds(policy):
        t = simulate_timeline(Scheduler(BlockManager(64, 4), max_num_batched_tokens=16, policy=policy), requests)
        return [s.kind for life, spans in t.spans().items() if life.seq_id == 'stream' for s in spans]
    assert kinds('prefill_first').count('stalled') == 1 and 'stalled' not in kinds('balanced')


def test_two_engines_do_not_mix(tiny):
    a, b = engine(tiny), engine(tiny)
    with a.record_timeline() as ta, b.record_timeline() as tb:
        for llm, name, n in ((a, 'a', 3), (b, 'b', 5)): llm.add_request(prompt(6), params(n), name)
        while a.requests or b.requests:
            for llm in (a, b): llm.step()
    for t, name, n in ((ta, 'a/0', 3), (tb, 'b/0', 5)):
        check(t)
        assert {life.seq_id: len(x) for life, x in t.token_times().items()} == {name: n}


def test_two_recordings_of_one_engine(tiny):
    llm = engine(tiny)
    with llm.record_timeline() as outer:
        llm.generate([prompt(6)], params(2), use_tqdm=False)
        with llm.record_timeline() as inner: llm.generate([prompt(6, 1)], params(3), use_tqdm=False)
        assert llm.observers == [outer]
    assert (len(inner.steps), len(outer.steps)) == (3, 5) and llm.observers == []


def test_memory_is_bounded(tiny):
    llm = engine(tiny)
    with llm.record_timeline(max_steps=5) as t:
        for i in range(30): llm.generate([prompt(6, i)], params(2), use_tqdm=False)
        assert len(t.steps) == 5 and len(t.ended) == 5 and not t.live and t.num_steps == 60
    check(t)
    assert len(t.lives()) <= 10


def test_no_sequence_is_kept_alive(tiny):
    llm = engine(tiny)
    with llm.record_timeline() as t:
        llm.add_request(prompt(6), params(2), 'gone')
        seq = weakref.ref(llm.requests['gone'].sequences[0])
        while llm.requests: llm.step()
        llm.generate([prompt(6, 1)], params(2), use_tqdm=False)       # the scheduler remembers its last step
        gc.collect()
        assert seq() is None and any(life.seq_id == 'gone/0' for life in t.lives())


def test_a_step_that_raises_is_not_recorded(tiny, monkeypatch):
    llm = engine(tiny)
    def broken(seqs): raise RuntimeError('out of order')
    with llm.record_timeline() as t:
        with monkeypatch.context() as m:
            m.setattr(llm.runner, 'run_decode', broken)
            with pytest.raises(RuntimeError, match='out of order'): llm.generate([prompt(6)], params(4), use_tqdm=False)
        assert [s.kind for s in t.steps] == ['prefill']
        llm.generate([prompt(6, 1)], params(2), use_tqdm=False)
        assert [s.kind for s in t.steps] == ['prefill', 'prefill', 'decode'] and (t.num_steps, t.num_failed) == (3, 1)
    check(t)
    [failed] = [life for life in t.lives() if life.finish_reason == 'abort']
    assert [s.kind for s in t.spans()[failed]] == ['waiting', 'prefill']


def test_off_there_is_nothing(tiny):
    llm = engine(tiny)
    before = set(vars(llm))
    with llm.record_timeline() as t: llm.generate([prompt(6)], params(2), use_tqdm=False)
    assert set(vars(llm)) == before and llm.observers == [] and t.scheduler is t.engine is t.pending is None
    llm.generate([prompt(6, 1)], params(2), use_tqdm=False)
    assert len(t.steps) == 2                                          # stopped is stopped
    engine_alive = weakref.ref(llm)
    del llm
    gc.collect()
    assert engine_alive() is None                                     # a timeline that is kept does not keep the engine


def test_steps_without_work_are_not_steps(tiny):
    llm = engine(tiny)
    with llm.record_timeline() as t: assert llm.step() == []
    assert not t.steps and t.num_failed == 0 and t.trace()['traceEvents'][0]['ph'] == 'M'
    check_trace(t.trace())


def test_given_up_and_its_name_used_again(tiny):
    llm = engine(tiny, max_num_seqs=1)
    with llm.record_timeline() as t:
        llm.add_request(prompt(6), params(9), 'a')
        llm.add_request(prompt(6, 1), params(9), 'b')
        for _ in range(3): llm.step()
        for name in 'ab': assert llm.abort_request(name)
        llm.add_request(prompt(5, 2), params(2), 'a')
        while llm.requests: llm.step()
    check(t)
    lives = [(life.seq_id, life.finish_reason, [s.kind for s in t.spans()[life]]) for life in t.lives()]
    assert lives == [('a/0', 'abort', ['waiting', 'prefill', 'decode', 'decode']), ('b/0', 'abort', ['waiting']), ('a/0', 'length', ['waiting', 'prefill', 'decode'])]


def test_recording_that_begins_in_the_middle(tiny):
    llm = engine(tiny, max_num_seqs=1)
    llm.add_request(prompt(6), params(6), 'running')
    llm.add_request(prompt(6, 1), params(2), 'waiting')
    for _ in range(3): llm.step()
    with llm.record_timeline() as t: llm.step()
    check(t)
    assert {life.seq_id: [s.kind for s in spans] for life, spans in t.spans().items()} == {'running/0': ['decode'], 'waiting/0': ['waiting']}


def test_oldest_steps_are_dropped_and_not_guessed(tiny):
    llm = engine(tiny)
    with llm.record_timeline(max_steps=3) as t: llm.generate([prompt(6)], params(9), use_tqdm=False)
    check(t)
    assert [[s.kind for s in spans] for spans in t.spans().values()] == [['decode'] * 3]


def test_drawn_and_stopped_while_another_thread_steps(tiny):
    llm, errors, done = engine(tiny), [], threading.Event()
    def drive():
        try:
            for i in range(12): llm.generate([prompt(6, i), prompt(9, i)], params(6), use_tqdm=False)
        except BaseException as e: errors.append(e)
        finally: done.set()
    thread = threading.Thread(target=drive)
    thread.start()
    while not done.is_set():
        with llm.record_timeline() as t:
            for _ in range(3): check_trace(t.trace()), t._repr_html_()
    thread.join(60)
    assert not errors and not thread.is_alive() and llm.observers == []
    drained(llm)


def test_observers_without_begin_are_left_alone(tiny):
    class Old:
        steps = ends = 0
        def step(self, work, seqs): self.steps += 1
        def end(self, request): self.ends += 1
    llm, old = engine(tiny), Old()
    llm.observers.append(old)
    with llm.record_timeline() as t: llm.generate([prompt(6)], params(2), use_tqdm=False)
    assert (old.steps, old.ends, len(t.steps)) == (2, 1, 2) and llm.observers == [old]


@pytest.mark.parametrize('bad', [0, -1, 2.5, True, None, '9'])
def test_max_steps_is_checked(tiny, bad):
    with pytest.raises(ValueError, match='max_steps'): Timeline(Scheduler(BlockManager(4, 4)), bad)


def test_the_file_is_what_trace_says(tiny, tmp_path):
    t = simulate_timeline(Scheduler(BlockManager(64, 4)), [Request(5, 3), Request(7, 2)])
    assert json.loads(t.save(tmp_path/'trace.json').read_text()) == json.loads(json.dumps(t.trace()))


def test_prices_are_found_and_never_negative():
    import numpy as np
    rng = np.random.default_rng(0)
    for _ in range(20):
        x, truth = rng.random((60, 5)), rng.random(5) * (rng.random(5) < .6)
        assert np.allclose(fit_nonnegative(x, x @ truth), truth, atol=1e-8)
        assert (fit_nonnegative(x, rng.normal(size=60)) >= 0).all()
    assert fit_nonnegative(np.zeros((3, 2)), np.ones(3)).tolist() == [0, 0]


def test_a_timed_simulation_is_explained_by_its_prices():
    cost = lambda out: .01 + .002*out.num_prefill_tokens + .003*len(out.decode_sequences)
    t = simulate_timeline(Scheduler(BlockManager(400, 4), max_num_batched_tokens=32), [Request(10 + 9*i, 6, arrival=.05*i) for i in range(15)], cost)
    assert max(StepTime(list(t.steps)).errors(t.steps)) < .2
