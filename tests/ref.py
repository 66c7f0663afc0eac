"The reference that engine tests compare with: one plain full forward per token, without a cache."
import torch

from minivllm.model import reference_attend


@torch.inference_mode()
def greedy(model, ids, n, stop_ids=()):
    "The `n` tokens that follow `ids`, fewer if one of `stop_ids` comes up (it is kept)."
    ids, out = list(ids), []
    while len(out) < n and not (out and out[-1] in stop_ids):
        hidden = model(torch.tensor(ids), torch.arange(len(ids)), reference_attend(model.config))
        out.append(model.compute_logits(hidden[-1:])[0].argmax().item())
        ids.append(out[-1])
    return out


def poison(engine):
    "From now on every block is filled with NaN when it is handed out."
    schedule = engine.scheduler.schedule
    def poisoned(*args, **kw):
        work = schedule(*args, **kw)
        engine.kv_cache.copy_blocks(work.blocks_to_copy)
        work.blocks_to_copy = []
        if work.new_blocks: engine.kv_cache.poison(work.new_blocks)
        return work
    engine.scheduler.schedule = poisoned
    return engine


def drained(engine):
    "Nothing is left behind: no request, no queue, no inbox, every block free or cached."
    assert not engine.requests and not engine.scheduler.waiting and not engine.scheduler.running and not getattr(engine, 'inbox', {})
    assert engine.block_manager.num_free_blocks == engine.block_manager.num_blocks
    engine.block_manager.check_integrity()
