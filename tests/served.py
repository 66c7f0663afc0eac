"A real server process on loopback for tests: `with Served(folder, '--max-queue', '4') as server: server.client().models.list()`"
import os
import re
import subprocess
import sys
import threading
import time

import httpx
from openai import OpenAI


class Served:
    "`minivllm serve` in a process of its own, on a port that the system chose; ready when entered.  `patch` is code that runs in it first."
    def __init__(self, model, *flags, env=None, patch='', start_timeout=120):
        self.argv = [sys.executable, '-c', patch + '\nimport sys; from minivllm.cli import main; sys.exit(main())', 'serve', str(model), '--port', '0', *map(str, flags)]
        self.env, self.start_timeout, self.lines = os.environ | {'OMP_NUM_THREADS': '1'} | (env or {}), start_timeout, []

    def __enter__(self):
        self.process = subprocess.Popen(self.argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=self.env)
        ready = threading.Event()
        def read():
            for line in self.process.stdout:
                self.lines.append(line)
                if 'is served at' in line: ready.set()
            ready.set()
        self.reader = threading.Thread(target=read, daemon=True)
        self.reader.start()
        assert ready.wait(self.start_timeout) and (found := re.search(r'is served at (\S+) ', self.log)), self.log
        self.url = found[1]
        self.port = int(self.url.rsplit(':', 1)[1])
        return self

    def __exit__(self, *_):
        if self.process.poll() is None: self.process.terminate()
        try: self.process.wait(30)
        except subprocess.TimeoutExpired: self.process.kill()
        self.reader.join(5)
        self.process.stdout.close()

    @property
    def log(self): return ''.join(self.lines)

    def client(self, **kw): return OpenAI(**dict(base_url=self.url + '/v1', api_key='none', max_retries=0, timeout=60) | kw)

    def get(self, path, **kw): return httpx.get(self.url + path, timeout=30, **kw)

    def post(self, path, body=None, **kw): return httpx.post(self.url + path, json=body, timeout=60, **kw)

    def metric(self, name, **labels):
        "The sum of a metric's samples that have these labels."
        total = 0.
        for line in self.get('/metrics').text.splitlines():
            m = re.fullmatch(r'([\w:]+)(?:\{(.*)\})? (\S+)', line)
            if m and m[1] == name and all(f'{k}="{v}"' in (m[2] or '') for k, v in labels.items()): total += float(m[3])
        return total

    def wait_idle(self, seconds=20):
        "Until nothing runs, nothing waits and no K/V is in use."
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if not any(self.metric(f'vllm:{k}') for k in ('num_requests_running', 'num_requests_waiting', 'kv_cache_usage_perc')): return True
            time.sleep(.05)
        raise AssertionError('the server is still busy: ' + str([self.metric(f'vllm:{k}') for k in ('num_requests_running', 'num_requests_waiting', 'kv_cache_usage_perc')]))

    def memory(self):
        "Resident bytes of the server."
        with open(f'/proc/{self.process.pid}/statm') as f: return int(f.read().split()[1]) * os.sysconf('SC_PAGE_SIZE')

    def cpu_seconds(self):
        "CPU time of the server so far, all threads."
        with open(f'/proc/{self.process.pid}/stat') as f: ticks = f.read().rsplit(')', 1)[1].split()[11:13]
        return sum(map(int, ticks)) / os.sysconf('SC_CLK_TCK')


def slow_down(seconds):
    "A `patch` that makes every decode step longer."
    return f"""
import time
from minivllm.model_runner import ModelRunner
whole = ModelRunner.run_decode
def run_decode(self, seqs):
    time.sleep({seconds})
    return whole(self, seqs)
ModelRunner.run_decode = run_decode
"""
