"The engine behind an event loop: the same tokens, and a clean end in every way in which a reader or the loop can go."
import asyncio
import gc
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import aclosing

import pytest

from minivllm import LLM, AsyncEngine, SamplingParams
from minivllm.async_engine import EngineDeadError, QueueFullError
from ref import greedy, poison


def prompt(n, seed=0): return [random.Random(seed).randrange(3, 250) for _ in range(n)]
def params(n=8, **kw): return SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, **kw)


def engine(tiny, max_queue=None, **kw):
    e = AsyncEngine(str(tiny), max_queue, **dict(dtype='float32', block_size=4, num_blocks=64) | kw)
    poison(e.engine)
    return e


async def idle(e):
    "Until everybody has gone; then nothing may be left."
    end = time.monotonic() + 20
    while e.engine.has_unfinished_requests() or not e.orders.empty():
        assert time.monotonic() < end
        await asyncio.sleep(.005)
    await asyncio.sleep(0)
    assert not e.mailboxes and not e.waiting and not e.engine.scheduler.has_unfinished
    assert e.engine.block_manager.num_free_blocks == e.engine.block_manager.num_blocks
    e.engine.block_manager.check_integrity()


async def tokens(deltas):
    out = {}
    async for d in deltas: out.setdefault(d.index, []).extend(d.token_ids)
    return [out[i] for i in sorted(out)]


def test_many_readers_get_what_they_get_alone(tiny):
    prompts = [prompt(n % 11 + 1, n) for n in range(30)]
    async def main():
        async with engine(tiny, max_num_seqs=7, num_blocks=40) as e:
            got = await asyncio.gather(*(tokens(e.generate(p, params(n % 9 + 1))) for n, p in enumerate(prompts)))
            await idle(e)
            return got, [greedy(e.engine.model, p, n % 9 + 1) for n, p in enumerate(prompts)]
    got, want = asyncio.run(main())
    assert [a for [a] in got] == want


def test_samples_of_one_request_and_its_output(tiny):
    async def main():
        async with engine(tiny) as e:
            texts, last = [''] * 3, None
            async for d in e.generate(prompt(6), SamplingParams(n=3, seed=1, max_tokens=9)):
                texts[d.index] += d.text
                last = d
            return texts, last.output
    texts, out = asyncio.run(main())
    assert texts == [o.text for o in out.outputs] and out.finished


def test_a_slow_reader_gets_everything_in_fewer_deltas(tiny):
    async def main():
        async with engine(tiny) as e:
            want, = await tokens(e.generate(prompt(6), params(30)))
            got, deltas = [], 0
            async for d in e.generate(prompt(6), params(30, logprobs=0)):
                got += d.token_ids
                deltas += 1
                assert len(d.logprobs) == len(d.token_ids)
                if deltas == 1:
                    while e.mailboxes: await asyncio.sleep(.005)
            assert len(e.mailboxes) == 0
            return want, got, deltas
    want, got, deltas = asyncio.run(main())
    assert got == want and deltas <= 3


def test_a_slow_reader_does_not_slow_the_others(tiny):
    async def main():
        async with engine(tiny) as e:
            slow = e.generate(prompt(5), params(40))
            await anext(slow)
            [other] = await tokens(e.generate(prompt(7), params(60)))     # complete, while nobody reads `slow`
            rest = await anext(slow)
            assert len(rest.token_ids) == 39 and rest.finish_reason == 'length'
            return other, greedy(e.engine.model, prompt(7), 60)
    other, want = asyncio.run(main())
    assert other == want


def test_abort_in_every_way_frees_everything(tiny):
    async def closed(e):
        async with aclosing(e.generate(prompt(9), params(200))) as g:
            async for d in g: break
    async def cancelled(e):
        task = asyncio.create_task(tokens(e.generate(prompt(9), params(200))))
        while not e.engine.requests: await asyncio.sleep(.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError): await task
    async def cancelled_at_once(e):
        task = asyncio.create_task(tokens(e.generate(prompt(9), params(200))))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError): await task
    async def timed_out(e):
        with pytest.raises(asyncio.TimeoutError): await asyncio.wait_for(tokens(e.generate(prompt(9), params(400))), .02)
    async def called(e):
        last = None
        async for d in e.generate(prompt(9), SamplingParams(n=3, max_tokens=200, ignore_eos=True), 'r'):
            if last is None: e.abort('r')
            last = d
        assert last.finish_reason == 'abort' and {o.finish_reason for o in last.output.outputs} == {'abort'}
    async def dropped(e):
        g = e.generate(prompt(9), params(200))
        await anext(g)
        del g
        gc.collect()
    async def never_started(e): e.generate(prompt(9), params(200))
    async def raised(e):
        with pytest.raises(ZeroDivisionError):
            async with aclosing(e.generate(prompt(9), params(200))) as g:
                async for d in g: 1/0
    async def main():
        async with engine(tiny) as e:
            for way in closed, cancelled, cancelled_at_once, timed_out, called, dropped, never_started, raised:
                await way(e)
                await idle(e)
                assert await tokens(e.generate(prompt(5), params())) == [greedy(e.engine.model, prompt(5), 8)], way
    asyncio.run(main())


def test_SV13_a_reader_that_leaves_is_gone_within_a_step_or_two(tiny):
    async def main():
        async with engine(tiny) as e:
            steps = 0
            step = e.engine.step
            def counted():
                nonlocal steps
                steps += 1
                time.sleep(.01)
                return step()
            e.engine.step = counted
            g = e.generate(prompt(9), params(400))
            await anext(g)
            before = steps
            await g.aclose()
            while e.engine.requests: await asyncio.sleep(.001)
            assert steps - before <= 2
            await idle(e)
    asyncio.run(main())


def test_bad_input_is_refused_at_the_call(tiny):
    async def main():
        async with engine(tiny) as e:
            for bad in ('', [10**6], [], list(range(3, 200)) * 3):
                with pytest.raises(ValueError): e.generate(bad, params())
            first = e.generate(prompt(3), params(100), 'twice')
            await anext(first)
            with pytest.raises(ValueError, match='in use'): await anext(e.read([e.engine.make_request(prompt(3), params(), 'twice')]))
            await first.aclose()
            await idle(e)
    asyncio.run(main())


def test_two_of_one_name_in_one_moment(tiny):
    async def main():
        async with engine(tiny) as e:
            both = [tokens(e.generate(prompt(3), params(), 'same')) for _ in range(2)]
            got = await asyncio.gather(*both, return_exceptions=True)
            assert [type(g) for g in got] == [list, ValueError] and got[0] == [greedy(e.engine.model, prompt(3), 8)]
            await idle(e)
    asyncio.run(main())


def test_a_full_queue(tiny):
    async def main():
        async with engine(tiny, max_queue=2, max_num_seqs=1) as e:
            running = e.generate(prompt(3), params(100))
            await anext(running)
            waiting = [asyncio.create_task(tokens(e.generate(prompt(4, i), params()))) for i in range(2)]
            await asyncio.sleep(.01)
            with pytest.raises(QueueFullError, match='max_queue is 2'): await tokens(e.generate(prompt(5), params()))
            with pytest.raises(ValueError, match='3 answers'): await tokens(e.generate(prompt(5), SamplingParams(n=3)))
            await running.aclose()
            assert await asyncio.gather(*waiting) == [[greedy(e.engine.model, prompt(4, i), 8)] for i in range(2)]
            assert await tokens(e.generate(prompt(5), params())) == [greedy(e.engine.model, prompt(5), 8)]
            await idle(e)
        with pytest.raises(ValueError, match='max_queue is 0'): AsyncEngine(e.engine, max_queue=0)
    asyncio.run(main())


@pytest.mark.parametrize('where', ['run_decode', 'run_prefill', 'sampler'])
def test_an_exception_in_the_loop_reaches_every_waiter(tiny, where, caplog):
    async def main():
        async with engine(tiny) as e:
            broken = False
            target = e.engine if where == 'sampler' else e.engine.runner
            whole = getattr(target, where)
            def maybe(*args, **kw):
                if broken: raise MemoryError('no memory left')
                return whole(*args, **kw)
            setattr(target, where, maybe)
            readers = [e.generate(prompt(4, i), params(300)) for i in range(3)]
            for g in readers: await anext(g)
            broken = True
            late = e.generate(prompt(4, 9), params())
            got = await asyncio.wait_for(asyncio.gather(*map(tokens, [*readers, late]), return_exceptions=True), 10)
            assert all(isinstance(x, EngineDeadError) and 'no memory left' in str(x) for x in got)
            with pytest.raises(EngineDeadError, match='no memory left'): await tokens(e.generate(prompt(3), params()))
            assert not e.mailboxes and not e.waiting
    with caplog.at_level(logging.CRITICAL, 'minivllm'): asyncio.run(asyncio.wait_for(main(), 30))


def test_close_ends_readers_and_the_thread(tiny):
    async def main():
        e = engine(tiny)
        task = asyncio.create_task(tokens(e.generate(prompt(5), params(300))))
        while not e.engine.requests: await asyncio.sleep(.001)
        await e.close()
        await e.close()                                   # twice is as good as once
        await asyncio.wait_for(task, 5)
        with pytest.raises(RuntimeError, match='closed'): e.generate('a', params())
        return e
    e = asyncio.run(main())
    assert not e.thread.is_alive() and not any(t.name == 'minivllm-engine' for t in threading.enumerate())


def test_another_event_loop_is_told(tiny):
    e = engine(tiny)
    asyncio.run(tokens(e.generate(prompt(5), params())))
    with pytest.raises(RuntimeError, match='another event loop'): asyncio.run(tokens(e.generate(prompt(5), params())))
    e.orders.put(None)
    e.thread.join()


SCRIPT = """
import asyncio, sys
from minivllm import AsyncEngine, SamplingParams
async def main():
    async with AsyncEngine(sys.argv[1], dtype='float32') as e:
        print('ready', flush=True)
        try:
            async for d in e.generate('the cat', SamplingParams(max_tokens=None, ignore_eos=True)):
                await asyncio.sleep(.05)
                print('token', flush=True)
        finally: print('left', flush=True)
    print('never')
try: asyncio.run(main())
except KeyboardInterrupt: print('interrupted', flush=True)
"""


def test_ctrl_c_ends_cleanly(tiny):
    p = subprocess.Popen([sys.executable, '-c', SCRIPT, str(tiny)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {'OMP_NUM_THREADS': '1'})
    while p.stdout.readline().strip() != 'token': assert p.poll() is None, p.stderr.read()
    p.send_signal(signal.SIGINT)
    out, err = p.communicate(timeout=60)
    assert out.split()[-2:] == ['left', 'interrupted'] and p.returncode == 0 and 'Traceback' not in err, err


# --- what chapter 08 learned for the server

def test_max_tokens_0_scores_the_prompt_and_generates_nothing(tiny):
    llm = poison(LLM(str(tiny), dtype='float32', block_size=4, num_blocks=64))
    llm.runner.run_decode = None
    [one] = llm.generate([prompt(9)], params(1, prompt_logprobs=2), use_tqdm=False)
    outs = llm.generate([prompt(9), prompt(5, 1), prompt(9)], [params(0, prompt_logprobs=2), params(1), params(0)], use_tqdm=False)
    assert [len(o.outputs[0].token_ids) for o in outs] == [0, 1, 0] and outs[0].outputs[0].finish_reason == 'length' and outs[0].outputs[0].text == ''
    assert [sorted(r) for r in outs[0].prompt_logprobs[1:]] == [sorted(r) for r in one.prompt_logprobs[1:]] and len(outs[0].prompt_logprobs) == 9
    assert outs[1].outputs[0].token_ids == greedy(llm.model, prompt(5, 1), 1)
    assert not llm.requests and llm.block_manager.num_free_blocks == 64
    full = llm.max_model_len
    assert llm.generate([prompt(full)], params(0), use_tqdm=False)[0].finished
    with pytest.raises(ValueError, match='fit'): llm.generate([prompt(full)], params(1), use_tqdm=False)


def test_PC12_opt_out_of_the_prefix_cache(tiny):
    llm = poison(LLM(str(tiny), dtype='float32', block_size=4, num_blocks=64))
    first, hit, out = (llm.generate([prompt(20)], params(skip_reading_prefix_cache=skip), use_tqdm=False)[0] for skip in (False, False, True))
    assert (first.num_cached_tokens, hit.num_cached_tokens, out.num_cached_tokens) == (0, 16, 0)
    assert first.outputs[0].token_ids == hit.outputs[0].token_ids == out.outputs[0].token_ids


def test_a_text_too_long_is_refused_before_it_is_tokenised(tiny):
    llm = LLM(str(tiny), dtype='float32', num_blocks=64)
    start = time.perf_counter()
    with pytest.raises(ValueError, match='characters'): llm.generate('a' * 10_000_000, params(), use_tqdm=False)
    assert time.perf_counter() - start < 1
    [out] = llm.generate('a' * 20_000, params(truncate_prompt_tokens=5), use_tqdm=False)
    assert len(out.prompt_token_ids) == 5
