"Requests in a poisoned pool for tests of attention kernels, on any device, and a float64 reference that knows no pool."
from dataclasses import dataclass

import torch

from minivllm.attention import build_metadata
from minivllm.kv_cache import KVCache


@dataclass
class Paged:
    "Requests of `contexts` tokens, of which the last `takes` ask; tables are scattered, unused slots are NaN"
    contexts: list
    takes: list | None = None       # default: one each, and `run` decodes
    nq: int = 4
    nkv: int = 2
    hd: int = 64
    block_size: int = 16
    window: int | None = None
    dtype: torch.dtype = torch.float32
    device: str = 'cpu'
    seed: int = 0
    spare: int = 2                  # blocks that belong to nobody

    def __post_init__(self):
        self.is_prefill, self.takes, self.scale = self.takes is not None, self.takes or [1]*len(self.contexts), self.hd**-.5
        g = torch.Generator(self.device).manual_seed(self.seed)
        rand = lambda n, heads: torch.randn(n, heads, self.hd, generator=g, device=self.device, dtype=torch.float32).to(self.dtype)
        need = [-(-n // self.block_size) for n in self.contexts]
        num_blocks = sum(need) + self.spare
        free = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(self.seed)).tolist()
        self.tables = [[free.pop() for _ in range(n)] for n in need]
        self.k, self.v = rand(sum(self.contexts), self.nkv), rand(sum(self.contexts), self.nkv)
        self.q = torch.cat([rand(sum(self.takes), self.nq), rand(sum(self.takes), 2)], 1)[:, :self.nq]        # a slice, as of a fused projection
        self.pool = KVCache(1, num_blocks, self.block_size, self.nkv, self.hd, self.dtype, self.device)
        self.pool.poison(range(num_blocks))
        self.everything = build_metadata(self.tables, self.contexts, self.contexts, self.block_size, True, self.device)
        self.metadata = build_metadata(self.tables, self.contexts, self.takes, self.block_size, self.is_prefill, self.device)

    def fill(self):
        "K and V into their slots, without any backend"
        for cache, x in zip(self.pool.layer(0), (self.k, self.v)): cache.flatten(0, 1)[self.everything.slot_mapping] = x

    def attend(self, backend): return (backend.prefill if self.is_prefill else backend.decode)(self.q, *self.pool.layer(0), self.metadata, self.scale, self.window)

    def expected(self):
        "Dense attention in float64, one request after the other"
        out, a, b = [], 0, 0
        for n, t in zip(self.contexts, self.takes):
            q, k, v = self.q[a:a+t].double(), self.k[b:b+n].double(), self.v[b:b+n].double()
            k, v = (x.repeat_interleave(self.nq // self.nkv, 1) for x in (k, v))
            for i in range(0, t, 512):
                ago = torch.arange(n - t, n, device=q.device)[i:i+512, None] - torch.arange(n, device=q.device)
                seen = (ago >= 0) & (ago < (self.window or n))
                scores = (torch.einsum('thd,shd->hts', q[i:i+512], k)*self.scale).masked_fill(~seen, -torch.inf)
                out.append(torch.einsum('hts,shd->thd', scores.softmax(-1), v))
            a, b = a + t, b + n
        return torch.cat(out)

    def error(self, backend):
        "Store and attend; the largest deviation from the reference, relative to values of size 1; NaN if any output is"
        backend.store_kv(self.k, self.v, *self.pool.layer(0), self.everything.slot_mapping)
        used = torch.zeros(self.pool.num_blocks*self.block_size, dtype=torch.bool, device=self.device)
        used[self.everything.slot_mapping] = True
        assert all(c.flatten(0, 1)[~used].isnan().all() for c in self.pool.layer(0)), 'a slot outside the block tables was written'
        out = self.attend(backend)
        assert out.shape == self.q.shape and out.dtype == self.dtype
        return (out.double() - self.expected()).abs().max().item()


TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}

def check(backend, *args, **kw):
    case = Paged(*args, **kw)
    error = case.error(backend)
    assert error < TOLERANCE[case.dtype], (error, case)

def around(block_size):
    "Lengths at which a block or a tile begins or ends"
    return sorted({1, max(1, block_size - 1), block_size, block_size + 1, 3*block_size + 2})
