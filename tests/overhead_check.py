"""What serving costs: time per token of 8 streams against `LLM.generate` on the same 8 prompts, in one run.  python tests/overhead_check.py

Rounds alternate between the two; the ratio is of medians.  The server is another process, which waits while the engine here computes and the other way
round.  Wall time needs a quiet machine; CPU time (of the engine's process, all its threads) hardly cares, and is given too."""
import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from load_check import requests, stream
from served import Served


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument('--model', default='smollm2-135m')
    p.add_argument('--rounds', type=int, default=7)
    p.add_argument('--tokens', type=int, default=64)
    p.add_argument('--streams', type=int, default=8)
    p.add_argument('--dtype', default='auto')
    a = p.parse_args()
    import torch
    from minivllm import LLM, SamplingParams
    bodies = [b | dict(max_tokens=a.tokens) for b in requests(a.streams)]
    params = SamplingParams(temperature=0, max_tokens=a.tokens, ignore_eos=True)
    llm = LLM(a.model, dtype=a.dtype, num_blocks=1024, enable_prefix_caching=False)
    def here():
        start, cpu = time.perf_counter(), time.process_time()
        outs = llm.generate([b['prompt'] for b in bodies], params, use_tqdm=False)
        return time.perf_counter() - start, [o.outputs[0].text for o in outs], time.process_time() - cpu
    async def all_streams(port): return await asyncio.gather(*(stream(port, b) for b in bodies))
    with Served(a.model, '--dtype', a.dtype, '--num-blocks', 1024, '--no-enable-prefix-caching', env=dict(OMP_NUM_THREADS=str(torch.get_num_threads()))) as server:
        def there():
            start, cpu = time.perf_counter(), server.cpu_seconds()
            texts = asyncio.run(all_streams(server.port))
            return time.perf_counter() - start, texts, server.cpu_seconds() - cpu
        same = here()[1] == there()[1]
        runs = [(here(), there()) for _ in range(a.rounds)]
    local, served, cpu, served_cpu = (statistics.median(r[side][what] for r in runs) for what in (0, 2) for side in (0, 1))
    per = 1000 / a.tokens
    print(json.dumps(dict(streams=a.streams, tokens=a.tokens, ms_per_step_local=round(local * per, 2), ms_per_step_served=round(served * per, 2), ratio=round(served / local, 3),
                          ratio_of_pairs=round(statistics.median(s[0] / l[0] for l, s in runs), 3), cpu_ms_local=round(cpu * per, 2), cpu_ms_served=round(served_cpu * per, 2), cpu_ratio=round(served_cpu / cpu, 3), same_texts=same)))


if __name__ == '__main__': main()
