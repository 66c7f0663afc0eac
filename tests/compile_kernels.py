"""Compile what the wrappers of minivllm.kernels.gpu would launch, for a GPU that need not be there: `python tests/compile_kernels.py 90`

The wrappers run on tensors without memory (device 'meta'), with Triton's launcher replaced: each launch becomes a compilation for the given
compute capability (80: A100, 89: L4, 90: H100); with `few`, only some shapes. Prints a line for each kernel, and the whole as JSON last."""
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from minivllm.attention import AttentionMetadata
from minivllm.kernels import gpu

capability, rows, seen = int(sys.argv[1]), [], set()
TYPES = {torch.float32: '*fp32', torch.float16: '*fp16', torch.bfloat16: '*bf16', torch.int32: '*i32', torch.int64: '*i64'}
cuobjdump = Path(triton.__file__).parent/'backends/nvidia/bin/cuobjdump'


def spilled(cubin):
    "Bytes of stack for each thread; None where the tool is not there"
    if not cuobjdump.exists(): return None
    with tempfile.NamedTemporaryFile(suffix='.cubin') as f:
        f.write(cubin); f.flush()
        text = subprocess.run([cuobjdump, '--dump-resource-usage', f.name], capture_output=True, text=True).stdout
    regs, stack = re.search(r'REG:(\d+) STACK:(\d+)', text).groups()
    return int(regs), int(stack)


def compile_instead(self, *args, grid, warmup, num_warps=4, num_stages=3, **kw):
    "Triton's `run`, up to the launch"
    given, signature, constants, attrs = dict(zip(self.arg_names, args)) | kw, {}, {}, {}
    for i, p in enumerate(self.params):
        x = given[p.name]
        if p.is_constexpr or x is None or (isinstance(x, int) and x == 1 and not p.do_not_specialize): signature[p.name], constants[(i,)] = 'constexpr', x
        elif isinstance(x, torch.Tensor): signature[p.name], attrs[(i,)] = TYPES[x.dtype], [['tt.divisibility', 16]]
        elif isinstance(x, float): signature[p.name] = 'fp32'
        else:
            signature[p.name] = 'i32'
            if x % 16 == 0 and not p.do_not_specialize: attrs[(i,)] = [['tt.divisibility', 16]]
    key = self.__name__, str(signature), str(constants), num_warps, num_stages
    if key in seen: return
    seen.add(key)
    start = time.time()
    done = triton.compile(ASTSource(self, signature, constants, attrs), target=GPUTarget('cuda', capability, 32), options=dict(num_warps=num_warps, num_stages=num_stages))
    regs, stack = spilled(done.asm['cubin']) or (None, None)
    rows.append(dict(kernel=self.__name__, hd=given.get('HD'), dtype=str(args[0].dtype).replace('torch.', ''), group=given.get('GROUP'), splits=given.get('SPLITS'), shared=done.metadata.shared,
                     registers=regs, stack=stack, wgmma=done.asm['ptx'].count('wgmma.mma_async'), mma=done.asm['ptx'].count('mma.sync')))
    print(rows[-1], f'{time.time() - start:.1f} s', flush=True)


triton.JITFunction.run = compile_instead
meta = lambda *shape, dtype=torch.int32: torch.empty(shape, dtype=dtype, device='meta')
backend = object.__new__(gpu.TritonAttention)
backend.processors = 132

def attention(hd, dtype, nq=16, nkv=8, n=4, bs=16, longest=2048, window=None):
    cache, x = meta(100, bs, nkv, hd, dtype=dtype), lambda T: meta(T, nq + 2*nkv, hd, dtype=dtype)[:, :nq]
    md = lambda T: AttentionMetadata(False, meta(T, dtype=torch.int64), meta(n, longest//bs), meta(n), meta(n + 1), meta(n + 1), T, longest, bs)
    backend.decode(x(n), cache, cache, md(n), .1, window)
    backend.prefill(x(512), cache, cache, md(512), .1, window)
    backend.store_kv(*(meta(n, nkv, hd, dtype=dtype) for _ in range(2)), cache, cache, meta(n, dtype=torch.int64))

few = 'few' in sys.argv
for hd in (80, 256) if few else (64, 80, 96, 128, 256): attention(hd, torch.bfloat16)
attention(128, torch.float16, nq=24)                    # groups of 3
attention(128, torch.bfloat16, n=1, nkv=1, nq=8)        # a batch of one: arguments that are 1
if not few:
    attention(128, torch.bfloat16, n=256, bs=1, window=1024)
    attention(128, torch.float32)
for dtype in (torch.bfloat16,) if few else (torch.bfloat16, torch.float32):
    x, weight, half = meta(64, 1024, dtype=dtype), meta(1024, dtype=dtype), meta(64, 64, dtype=dtype)
    gpu.rms_norm(x, weight, 1e-6)
    gpu.rms_norm(x, weight, 1e-6, x)
    gpu.silu_mul(meta(64, 6144, dtype=dtype))
    gpu.rotate_heads(meta(64, 32*128, dtype=dtype), (16, 8), half, half, weight, weight, 1e-6)
    gpu.rotate_heads(meta(64, 32*128, dtype=dtype), (16, 8), half, half)
print(json.dumps(rows))
