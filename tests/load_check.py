"""Load on a real server: streaming clients, some of whom hang up.  python tests/load_check.py --seconds 60 --clients 200 [--end SIGTERM|SIGKILL]

What must hold: nobody but who hung up sees an error; every full answer is the one that the same request gets alone; afterwards
no K/V is in use and the server's memory is what it was.  With `--end` the server is ended in the middle: every client then has a full answer, an error or no connection, none waits for
ever, and a new server answers as before.  Prints one line of JSON; exit status 1 if something does not hold."""
import argparse
import asyncio
import json
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from served import Served

WORDS = 'the quick brown fox jumps over a lazy dog while cats sleep on warm stones near old rivers'.split()


def requests(n, seed=0):
    "`n` different requests, greedy, of 4 to 40 words and 4 to 16 tokens."
    rng = random.Random(seed)
    return [dict(prompt=' '.join(rng.choices(WORDS, k=rng.randrange(4, 40))), max_tokens=rng.randrange(4, 17), temperature=0, ignore_eos=True, stream=True) for _ in range(n)]


class NotTaken(ConnectionError):
    "No byte of an answer came: the request may be sent again."


async def stream(port, body, leave_after=None):
    "Text of one answer, or None if we hung up after `leave_after` events; anything else is an exception."
    data, status = json.dumps(body).encode(), b''
    reader, writer = await asyncio.open_connection('127.0.0.1', port)
    try:
        writer.write(b'POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n' % len(data) + data)
        text, events, status = '', 0, await reader.readline()
        if not status: raise ConnectionResetError
        if leave_after == 0: return None
        if b' 200 ' not in status: raise RuntimeError(f'{status!r} {await reader.read()!r}')
        async for line in reader:
            if not line.startswith(b'data: '): continue
            if line.startswith(b'data: [DONE]'): return text
            event = json.loads(line[6:])
            if 'error' in event: raise RuntimeError(str(event))
            text += event['choices'][0]['text']
            events += 1
            if events == leave_after: return None
        raise RuntimeError('the stream ended without [DONE]')
    except ConnectionResetError: raise RuntimeError('the stream broke') if status else NotTaken('closed before an answer began') from None
    finally:
        writer.close()


async def client(port, asks, alone, until, hang_up, rng, counts):
    "One client: request after request until the time is over."
    while time.monotonic() < until:
        i = rng.randrange(len(asks))
        leave = rng.randrange(0, asks[i]['max_tokens']) if rng.random() < hang_up else None
        try: text = await stream(port, asks[i], leave)
        except (RuntimeError, OSError) as e:
            counts['errors'] += 1
            counts[f'error: {e!r:.200}'] += 1
        else: counts['left' if text is None else 'equal' if text == alone[i] else 'DIFFERENT'] += 1


async def load(port, asks, alone, clients, seconds, hang_up=.3, seed=1):
    counts, until = Counter(), time.monotonic() + seconds
    await asyncio.gather(*(client(port, asks, alone, until, hang_up, random.Random(seed * 1000 + k), counts) for k in range(clients)))
    return counts


def check(server, clients, seconds, distinct=24):
    "Run it; returns a report in which `ok` says whether all holds."
    asks = requests(distinct)
    async def one_by_one(): return [await stream(server.port, a) for a in asks]
    alone = asyncio.run(one_by_one())
    asyncio.run(load(server.port, asks, alone, clients, min(seconds, 15), seed=2))       # every block of the pool is touched, every buffer has its size
    server.wait_idle(120)
    before, start = server.memory(), time.monotonic()
    counts = asyncio.run(load(server.port, asks, alone, clients, seconds))
    server.wait_idle(120)
    report = dict(clients=clients, seconds=round(time.monotonic() - start), **counts, memory=round(server.memory() / before, 3), kv_in_use=server.metric('vllm:kv_cache_usage_perc'),
                  aborted=server.metric('vllm:request_success_total', finished_reason='abort'), preemptions=server.metric('vllm:num_preemptions_total'))
    report['ok'] = not counts['errors'] and not counts['DIFFERENT'] and counts['equal'] > 0 and counts['left'] > 0 and report['memory'] < 1.05 and report['kv_in_use'] == 0
    return report


async def last_words(server, asks, alone, clients, after, end):
    "All clients ask, over and over, until the server, ended by the signal `end` after a while, is gone; what each met last."
    rng, met = [random.Random(k) for k in range(clients)], Counter()
    async def one(k):
        while True:
            i = rng[k].randrange(len(asks))
            try: text = await stream(server.port, asks[i])
            except (ConnectionRefusedError, NotTaken): return 'refused'
            except RuntimeError as e: return 'told' if 'shutting down' in str(e) else 'cut off'
            met['equal' if text == alone[i] else 'DIFFERENT'] += 1
    everyone = asyncio.gather(*(asyncio.wait_for(one(k), after + 120) for k in range(clients)))
    await asyncio.sleep(after)
    running = await asyncio.to_thread(server.metric, 'vllm:num_requests_running')
    start = time.monotonic()
    server.process.send_signal(end)
    return Counter(await everyone) | met, running, round(time.monotonic() - start, 1)


def check_end(start, clients, end, after=5, distinct=24):
    "End a server under load; `start()` makes one. Returns a report as `check` does."
    asks = requests(distinct)
    async def one_by_one(port): return [await stream(port, a) for a in asks]
    with start() as server:
        alone = asyncio.run(one_by_one(server.port))
        met, running, seconds = asyncio.run(last_words(server, asks, alone, clients, after, end))
        code = server.process.wait(60)
    with start() as again: same = asyncio.run(one_by_one(again.port)) == alone
    report = dict(end=end.name, clients=clients, running_at_the_end=running, **met, seconds_to_the_last_client=seconds, exit_status=code, restart_answers_the_same=same)
    clean = code == 0 and not met['cut off'] and 'Traceback' not in server.log if end == signal.SIGTERM else code == -end and met['cut off'] > 0
    report['ok'] = clean and same and running > 0 and met['equal'] > 0 and not met['DIFFERENT'] and met['refused'] + met['told'] + met['cut off'] == clients
    return report


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument('--model', default='smollm2-135m')
    p.add_argument('--clients', type=int, default=200)
    p.add_argument('--seconds', type=float, default=60)
    p.add_argument('--num-blocks', type=int, default=1024)
    p.add_argument('--end', choices=['SIGTERM', 'SIGKILL'], help='end the server under this load instead of looking at it afterwards')
    a = p.parse_args()
    if a.end:
        report = check_end(lambda: Served(a.model, '--dtype', 'float32', '--num-blocks', a.num_blocks, env={}), a.clients, signal.Signals[a.end], a.seconds)
        print(json.dumps(report))
        return 0 if report['ok'] else 1
    with Served(a.model, '--dtype', 'float32', '--num-blocks', a.num_blocks, env={}) as server: report = check(server, a.clients, a.seconds)
    print(json.dumps(report))
    return 0 if report['ok'] and 'Traceback' not in server.log else 1


if __name__ == '__main__': sys.exit(main())
