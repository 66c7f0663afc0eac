"The benchmark against servers whose times are known, and against our own."
import asyncio
import json
import math
import re
import statistics
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest

from minivllm.bench import Result, arrivals, check_serve, itl, random_asks, read_trace, report, run_engine, serve_load, serve_parser, sleep_until, spread, table
from minivllm.cli import main
from served import Served


# ---- a server in a thread of its own, whose times we choose

class Stub:
    """Speaks the OpenAI protocol as vLLM does: first a role without text, then `per_event` tokens in each event, usage once at the end, [DONE].
    The first event with text comes after `ttft` seconds, each further one after `gap`; every `drop`-th answer is cut off, `before` or after its first words."""
    def __init__(self, ttft=.06, gap=.02, per_event=1, drop=None, counts=False, usage=True, before=False, strict=False, refuse=False):
        self.ttft, self.gap, self.per_event, self.drop, self.counts, self.usage, self.before, self.strict, self.refuse = ttft, gap, per_event, drop, counts, usage, before, strict, refuse
        self.bodies, self.open, self.most, self.times = [], 0, 0, []

    async def serve(self, reader, writer):
        "One connection, any number of requests."
        try:
            while True:
                head = (await reader.readuntil(b'\r\n\r\n')).decode().lower()
                start = time.monotonic()
                length = re.search(r'content-length: (\d+)', head)
                await self.route(head.split()[1], await reader.readexactly(int(length[1]) if length else 0), start, writer)
        except (asyncio.IncompleteReadError, ConnectionError): pass     # the client has gone, or we have dropped it
        finally: writer.close()

    async def route(self, path, data, start, writer):
        if path == '/v1/models': return self.plain(writer, 200, dict(object='list', data=[dict(id='stub', object='model')]))
        if path not in ('/v1/completions', '/v1/chat/completions'): return self.plain(writer, 404, dict(error=dict(message='no such page')))
        if self.refuse: return self.plain(writer, 404, dict(error=dict(message='the model does not exist')))
        body = json.loads(data)
        if self.strict and set(body['stream_options']) - {'include_usage'}: return self.plain(writer, 400, dict(error=dict(message='stream_options: unknown field')))
        self.bodies.append(body)
        self.times.append(start)
        self.open += 1
        self.most = max(self.most, self.open)
        try: await self.answer(body, 'chat' in path, len(self.bodies), start, writer)
        finally: self.open -= 1

    def plain(self, writer, status, body):
        data = json.dumps(body).encode()
        writer.write(b'HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n' % (status, len(data)) + data)

    async def answer(self, body, chat, number, start, writer):
        drop, n, done = self.drop and number % self.drop == 0, body['max_tokens'], 0
        def part(data): writer.write(b'%x\r\n%s\r\n' % (len(data), data))
        def event(text, finish=None, choices=True, **more):
            inner = dict(delta=dict(content=text) if done else dict(role='assistant', content=text)) if chat else dict(text=text)
            data = dict(id='x', object='x', model='stub', choices=[dict(index=0, **inner, finish_reason=finish)] if choices else [], **more)
            if self.counts: data['usage'] = dict(prompt_tokens=7, completion_tokens=done)
            part(b'data: ' + json.dumps(data).encode() + b'\n\n')
        def cut():
            writer.transport.abort()
            raise ConnectionResetError('dropped')
        if drop and self.before: cut()
        writer.write(b'HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n')
        if chat: event('')
        due = start + self.ttft
        while done < n:
            await sleep_until(due, time.monotonic)                          # each at its time, however late the one before was
            due += self.gap
            if drop and done: cut()
            more = min(self.per_event, n - done)
            done += more
            event(' word' * more, 'length' if done == n else None)
        if self.usage: event('', choices=False, usage=dict(prompt_tokens=7, completion_tokens=done))
        part(b'data: [DONE]\n\n')
        writer.write(b'0\r\n\r\n')
        await writer.drain()


@contextmanager
def running(stub):
    "Its base URL; a thread, so that the client's event loop is its own."
    loop, ready = asyncio.new_event_loop(), threading.Event()
    async def main():
        nonlocal port, stop
        stop = asyncio.Event()
        server = await asyncio.start_server(stub.serve, '127.0.0.1', 0)
        port = server.sockets[0].getsockname()[1]
        ready.set()
        await stop.wait()
        server.close()
        if left := asyncio.all_tasks() - {asyncio.current_task()}: await asyncio.wait(left, timeout=5)      # until it sees that its client has hung up
    port = stop = None
    thread = threading.Thread(target=loop.run_until_complete, args=(main(),), daemon=True)
    thread.start()
    assert ready.wait(10)
    try: yield f'http://127.0.0.1:{port}'
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        loop.close()


def bench(url, *flags, capsys):
    "The JSON on the last line, and everything before it."
    assert main(['bench', 'serve', '--base-url', url, *map(str, flags)]) == 0, capsys.readouterr().err
    *text, last = capsys.readouterr().out.rstrip('\n').split('\n')
    return json.loads(last), '\n'.join(text)


def together(stub, *flags):
    "`(report, results)` of client and stub in one event loop: what is measured is the client, not how soon a busy machine wakes the other thread"
    args = serve_parser().parse_args(list(map(str, flags)))
    async def both():
        async with await asyncio.start_server(stub.serve, '127.0.0.1', 0) as server:
            args.base_url = f'http://127.0.0.1:{server.sockets[0].getsockname()[1]}'
            load = await serve_load(args, check_serve(args))
            await asyncio.sleep(.05)                # the stub sees that the client has hung up
            return load
    results, seconds, figures, which = asyncio.run(both())
    assert which == dict(model='stub', server_version=None) and figures == {}
    return report(results, seconds), results


# ---- what is reported is what happened

@pytest.mark.parametrize('endpoint, per_event, counts', [('/v1/completions', 1, False), ('/v1/chat/completions', 1, True), ('/v1/chat/completions', 4, False), ('/v1/completions', 4, True)])
def test_known_times_are_reported_within_2_ms(endpoint, per_event, counts, capsys):
    known = dict(ttft=100, tpot=40 * (8 // per_event - 1) / 7, e2el=100 + 40 * (8 // per_event - 1)) | (dict(itl=40 / per_event) if per_event == 1 or counts else {})
    off = dict.fromkeys(known, math.inf)
    for attempt in range(8):         # other work on the machine may make one run late, but not each
        rep, results = together(Stub(ttft=.1, gap=.04, per_event=per_event, counts=counts), '--endpoint', endpoint, '--num-prompts', 9, '--max-concurrency', 1, '--random-output-len', 8)
        assert (rep['completed'], rep['total_output_tokens'], rep['total_input_tokens'], rep['estimated_itl']) == (9, 72, 63, 9 if per_event > 1 and not counts else 0)
        off = {k: min(off[k], abs(rep[f'p50_{k}_ms'] - ms)) for k, ms in known.items()}
        if max(off.values()) < 2: return
    raise AssertionError(f'reported minus slept, ms: {off}')


def test_ttft_and_tpot_make_up_the_whole_time():
    "Of each request, within 1%: the end is when the stream has ended, TPOT is from token to token"
    for attempt in range(5):
        _, results = together(Stub(ttft=.4, gap=.03), '--num-prompts', 10, '--request-rate', 40, '--random-output-len', 12, '--random-range-ratio', .5, '--random-input-len', 4)
        assert len(results) == 10 and len({r.num_tokens for r in results}) > 3
        off = max(abs(r.ttft + r.tpot * (r.num_tokens - 1) - r.e2el) / r.e2el for r in results)
        assert all(r.e2el > r.chunks[-1][0] - r.due for r in results)       # not the same by definition
        if off <= .01: return
    raise AssertionError(off)


def test_ttft_and_tpot_make_up_the_whole_time_in_an_engine(tiny):
    from minivllm.engine import Engine
    with Engine(str(tiny), dtype='float32', num_blocks=24, block_size=8, max_num_seqs=4) as engine:
        watch = run_engine(engine, random_asks(arrivals(16, 500.), 30, 20, range_ratio=.5, vocab_size=engine.config.vocab_size))
        assert len(watch.results) == 16 and watch.figures()['preemptions'] > 0        # crowded: some lose their blocks in between
        for r in watch.results: assert abs(r.ttft + r.tpot * (r.num_tokens - 1) - r.e2el) <= .01 * r.e2el
        assert engine.observers == []


@pytest.mark.parametrize('before', [True, False], ids=['at once', 'in the middle'])
def test_dropped_connections_are_failures_and_the_rest_is_intact(before, capsys):
    with running(Stub(ttft=.03, gap=.01, drop=10, before=before)) as url:
        rep, text = bench(url, '--num-prompts', 40, '--max-concurrency', 8, '--random-output-len', 6, '--random-input-len', 4, '--goodput', 'ttft:60000', capsys=capsys)
    assert rep['failed'] == 4 and rep['completed'] == 36 and rep['total_output_tokens'] == 36 * 6
    assert rep['good_share'] == pytest.approx(.9)
    assert sum(rep['errors'].values()) == 4 and all(e in text for e in rep['errors'])


def test_a_server_that_falls_silent_is_given_up(capsys):
    class Silent(Stub):
        async def answer(self, body, chat, number, *args):
            self.gap = .6 if number % 2 == 0 else .001
            await super().answer(body, chat, number, *args)
    with running(Silent(ttft=.01)) as url: rep, _ = bench(url, '--num-prompts', 4, '--max-concurrency', 1, '--timeout', .3, '--random-output-len', 2, capsys=capsys)
    assert rep['completed'] == 2 and rep['errors'] == {'ConnectionError: no sign of life for 0.3 s': 2}


def test_a_server_that_refuses_what_it_does_not_know_is_asked_without(capsys):
    stub = Stub(ttft=.01, gap=.005, strict=True)
    with running(stub) as url: rep, text = bench(url, '--num-prompts', 3, '--random-output-len', 4, capsys=capsys)
    assert rep['completed'] == 3 and rep['server'] == {} and 'TTFT' in text and '3 answered, 0 failed' in text
    assert all(b['stream_options'] == dict(include_usage=True) for b in stub.bodies)


def test_without_usage_chunks_are_counted_and_it_is_said(capsys):
    with running(Stub(ttft=.01, gap=.005, usage=False)) as url: rep, text = bench(url, '--num-prompts', 3, '--random-output-len', 4, capsys=capsys)
    assert rep['total_output_tokens'] == 12 and rep['estimated_itl'] == 3 and 'ITL estimated for 3 answers' in text


def test_fields_of_a_request(capsys):
    stub = Stub(ttft=.01, gap=.005)
    with running(stub) as url: bench(url + '/v1', '--num-prompts', 2, '--random-output-len', 5, '--random-input-len', 9, '--ignore-eos', '--temperature', .5, '--model', 'mine', capsys=capsys)
    for b in stub.bodies[1:]:
        assert (b['model'], b['max_tokens'], b['ignore_eos'], b['temperature'], b['stream'], len(b['prompt'].split())) == ('mine', 5, True, .5, True, 9)


# ---- against our own server

def test_client_and_server_agree_within_5_percent(capsys):
    with Served('smollm2-135m', '--dtype', 'float32', '--num-blocks', 256) as server:
        rep, text = bench(server.url, '--num-prompts', 3, '--max-concurrency', 1, '--random-input-len', 160, '--random-output-len', 10, '--ignore-eos', '--metrics-interval', .2, capsys=capsys)
    theirs = rep['server']
    assert rep['total_output_tokens'] == 30 and rep['total_input_tokens'] == 480 and rep['estimated_itl'] == 0
    for name in ('ttft', 'itl', 'e2el'): assert theirs[f'mean_{name}_ms'] == pytest.approx(rep[f'mean_{name}_ms'], rel=.05), (name, rep)
    assert theirs['peak_running'] == 1 and 0 < theirs['peak_kv_cache_usage'] <= 1 and theirs['preemptions'] == 0
    assert len(theirs['series']['time']) >= 2 and 'server:' in text
    assert rep['machine']['cpu'] and rep['machine']['commit'] != '' and rep['seed'] == 0 and rep['server_version'] == rep['machine']['minivllm']


# ---- the load generator

def test_the_same_seed_makes_the_same_load():
    for burstiness in (.5, 1., 3., math.inf):
        assert arrivals(50, 3., burstiness, 1) == arrivals(50, 3., burstiness, 1)
    assert arrivals(50, 3., 1., 1) != arrivals(50, 3., 1., 2)
    assert random_asks([0.] * 5, 9, 9, .5, seed=1) == random_asks([0.] * 5, 9, 9, .5, seed=1) != random_asks([0.] * 5, 9, 9, .5, seed=2)


@pytest.mark.parametrize('rate', [.5, 7., 300.])
def test_poisson_gaps(rate):
    "Mean 1/rate, and as many below the median of an exponential as above"
    times = arrivals(20_000, rate, seed=5)
    gaps = [b - a for a, b in zip(times, times[1:])]
    assert statistics.mean(gaps) == pytest.approx(1 / rate, rel=.03) and statistics.stdev(gaps) == pytest.approx(1 / rate, rel=.03)
    assert sum(g < math.log(2) / rate for g in gaps) / len(gaps) == pytest.approx(.5, abs=.02)


@pytest.mark.parametrize('flags', [[], ['--request-rate', '500']], ids=['closed loop', 'with a rate'])
def test_never_more_open_than_max_concurrency(flags, capsys):
    stub = Stub(ttft=.01, gap=.002)
    with running(stub) as url: rep, _ = bench(url, '--num-prompts', 30, '--max-concurrency', 3, '--random-output-len', 4, *flags, capsys=capsys)
    assert rep['completed'] == 30 and stub.most == 3


def test_a_slow_server_does_not_slow_the_sender_down(tmp_path, capsys):
    "Open loop: all is sent before the first answer has ended, and waiting counts from when a request was due"
    stub = Stub(ttft=1., gap=.01)
    with running(stub) as url: rep, _ = bench(url, '--num-prompts', 10, '--request-rate', 50, '--random-output-len', 2, capsys=capsys)
    assert stub.most == 10 and rep['completed'] == 10 and rep['p50_ttft_ms'] >= 1000
    stub = Stub(ttft=.2, gap=.01)
    with running(stub) as url: rep, text = bench(url, '--num-prompts', 4, '--request-rate', 1000, '--burstiness', 'inf', '--max-concurrency', 1, '--random-output-len', 2, capsys=capsys)
    assert rep['p99_ttft_ms'] > 750 and rep['p99_client_queue_time_ms'] > 550 and 'client queue: p99' in text       # the fourth waits for three others, at the client


def test_a_trace_is_sent_at_its_times(tmp_path, capsys):
    rows = [dict(timestamp=t, input_length=5, output_length=2 + i) for i, t in enumerate((1000, 1250, 1300, 1700))] + [dict(timestamp=1500, prompt='Say this', output_length=9)]
    (tmp_path/'trace.jsonl').write_text('\n'.join(map(json.dumps, rows)))
    stub, flags = Stub(ttft=.01, gap=.001), ['--dataset-name', 'timed_trace', '--dataset-path', tmp_path/'trace.jsonl', '--timed-trace-sec-multiplier', '.001']
    with running(stub) as url: rep, _ = bench(url, *flags, '--output', tmp_path/'out.json', capsys=capsys)
    sent = json.loads((tmp_path/'out.json').read_text())['requests']
    assert [r['due'] for r in sent] == pytest.approx([0, .25, .3, .5, .7]) and all(0 <= r['sent'] - r['due'] for r in sent)
    assert statistics.median(r['sent'] - r['due'] for r in sent) < .005
    assert [b['max_tokens'] for b in stub.bodies[1:]] == [2, 3, 4, 9, 5] and stub.bodies[4]['prompt'] == 'Say this'
    assert [b - a for a, b in zip(stub.times[1:], stub.times[2:])] == pytest.approx([.25, .05, .2, .2], abs=.05)
    with pytest.raises(ValueError, match='line 2 cannot be used'):
        (tmp_path/'bad.jsonl').write_text('{"timestamp": 1, "prompt": "a", "output_length": 1}\n{"timestamp": 2}')
        read_trace(tmp_path/'bad.jsonl')


# ---- pieces

def test_tokens_of_chunks_always_add_up():
    for sizes in ([1], [5, 1, 1], [3] * 17, [1, 100, 1]):
        for total in range(60):
            parts = spread(total, sizes)
            assert sum(parts) == total and len(parts) == len(sizes) and min(parts) >= 0
            assert not total or parts[0] > 0 and (parts[-1] > 0 or total == 1)


def test_mean_itl_is_tpot_however_tokens_are_wrapped():
    r = Result(1., chunks=[(1.5, 3), (1.6, 1), (2., 5), (2.1, 2)], end=2.2)
    assert len(itl(r)) == r.num_tokens - 1 and statistics.mean(itl(r)) == pytest.approx(r.tpot)


def test_a_report_without_a_single_answer():
    rep = report([Result(0., error='refused')], 1., goodput=dict(ttft=1.))
    assert rep['completed'] == 0 and rep['p99_ttft_ms'] is None and rep['good_share'] == 0 and '1 x refused' in table(rep)
    json.dumps(rep, allow_nan=False)


# ---- mistakes, and what a program sees

@pytest.mark.parametrize('argv, words', [
    (['serve', '--num-prompts', '-3'], '--num-prompts is -3'),
    (['serve', '--num-prompts', 'x'], "--num-prompts: invalid int value: 'x'"),
    (['serve', '--request-rate', '0'], '--request-rate is 0.0'),
    (['serve', '--goodput', 'speed:3'], '--goodput is speed:3'),
    (['serve', '--base-url', 'nowhere'], '--base-url is nowhere'),
    (['serve', '--base-url', 'http://127.0.0.1:9'], 'http://127.0.0.1:9'),                          # the port of `discard`: nobody listens
    (['serve', '--dataset-name', 'timed_trace', '--dataset-path', 'none.jsonl'], 'none.jsonl'),
    (['serve', '--output', 'run.pdf'], '--output is run.pdf'),
    (['serve', '--frobnicate'], '--frobnicate'),
    (['latency', '--batch-size', '0'], '--batch-size is 0'),
    (['throughput', '--random-range-ratio', '1'], '--random-range-ratio is 1.0'),
    (['sweep', '--policy', 'best'], '--policy is best'),
    (['sweep', '--max-num-batched-tokens', '0'], '--max-num-batched-tokens is 0'),
    (['forward'], 'give one of latency'),
])
def test_a_mistake_is_one_line_that_names_flag_and_value(argv, words, capsys):
    assert main(['bench', *argv]) == 2
    out, err = capsys.readouterr()
    assert words in err and err.count('\n') == 1 and not out, err


def test_help_names_the_measurements_and_their_flags(capsys):
    assert main(['bench', '--help']) == 0
    out = capsys.readouterr().out
    assert all(kind in out for kind in ('latency', 'throughput', 'serve', 'sweep', 'peers'))
    for kind, flag in (('latency', '--batch-size'), ('throughput', '--policy'), ('serve', '--burstiness'), ('sweep', '--request-rate')):
        with pytest.raises(SystemExit, match='0'): main(['bench', kind, '--help'])
        assert flag in capsys.readouterr().out


def test_a_model_that_does_not_exist_is_one_line(capsys):
    with running(Stub(refuse=True)) as url: assert main(['bench', 'serve', '--base-url', url, '--model', 'nobody']) == 2
    err = capsys.readouterr().err
    assert 'does not answer' in err and 'the model does not exist' in err and err.count('\n') == 1


def test_the_client_needs_neither_torch_nor_matplotlib(tmp_path):
    with running(Stub(ttft=.01, gap=.001)) as url:
        code = f'''import sys; from minivllm.cli import main
assert main(["bench", "serve", "--base-url", {url!r}, "--num-prompts", "2", "--random-output-len", "2"]) == 0
assert not {{"torch", "matplotlib", "transformers"}} & set(sys.modules)'''
        r = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, timeout=120)
    assert r.returncode == 0, r.stderr
    assert json.loads(r.stdout.splitlines()[-1])['completed'] == 2


def test_pictures(tmp_path, capsys):
    with running(Stub(ttft=.01, gap=.001)) as url: bench(url, '--num-prompts', 2, '--random-output-len', 3, '--output', tmp_path/'a.svg', tmp_path/'a.png', capsys=capsys)
    assert (tmp_path/'a.svg').read_text().count('<svg') == 1 and (tmp_path/'a.png').read_bytes().startswith(b'\x89PNG')
