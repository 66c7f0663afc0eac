"An LLM inference engine that is written to be read, and run."
__version__ = "0.0.1"

import os
from importlib import import_module

# PyTorch's OpenMP reads this when it is loaded: a thread that waits for another gives its core back after some 200 microseconds, not after
# milliseconds. Costs nothing that could be measured on a quiet machine; beside other programs tokens come several times as fast (chapter 10a).
if 'OMP_WAIT_POLICY' not in os.environ: os.environ.setdefault('GOMP_SPINCOUNT', '10000')

_homes = dict(LLM='engine', Engine='engine', RequestOutput='engine', CompletionOutput='engine', Delta='engine', AsyncEngine='async_engine',
              SamplingParams='sampling', StructuredOutputsParams='sampling', Sequence='sequence', Scheduler='scheduler', BlockManager='block_manager', Tokenizer='tokens')
__all__ = list(_homes)


def __getattr__(name):
    "Import a public name when it is first used, so that `import minivllm` costs nothing and the pure-Python half needs no torch (PEP 562)."
    if name not in _homes: raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    return getattr(import_module(f'{__name__}.{_homes[name]}'), name)


def __dir__(): return sorted([*globals(), *__all__])
