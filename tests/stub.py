"A model that is a function of the tokens it can really read through the block table, and the smallest engine around it. No torch."
from types import SimpleNamespace

from minivllm.block_manager import BlockManager
from minivllm.scheduler import Scheduler
from minivllm.sequence import Sequence

VOCAB = 97
POISON = object()


def next_token(tokens):
    "The model: depends on every token and on its place"
    h = 7
    for t in tokens: h = (h * 31 + t + 1) % 1_000_003
    return h % VOCAB


def reference(prompt, max_tokens, capacity=None, stop=(), index=0):
    "What the `index`-th answer to a prompt must be, whatever happens around it: one plain forward per token"
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append((next_token(tokens) + index) % VOCAB)
        if tokens[-1] in stop or capacity is not None and len(tokens) > capacity: break
    return tokens[len(prompt):]


class StubEngine:
    "Schedule, write 'K/V' (the token ids themselves) into slots, read it back, sample"
    def __init__(self, num_blocks=16, block_size=4, enable_prefix_caching=True, max_model_len=None, model=next_token, **kw):
        self.bm = BlockManager(num_blocks, block_size, enable_prefix_caching)
        self.scheduler = Scheduler(self.bm, max_model_len=max_model_len, **kw)
        self.memory = [POISON] * (num_blocks * block_size)
        self.max_model_len, self.model, self.num_steps, self.num_added, self.seqs, self.siblings, self.outputs = max_model_len, model, 0, 0, {}, {}, []

    def add(self, prompt, max_tokens=8, *, seq_id=None, min_tokens=0, stop=(), n=1, **kw):
        "Queue a request for n answers; returns the first sequence, the others fork from it when the prompt has been read"
        self.num_added += 1
        seq_id = seq_id or f's{self.num_added}'
        params = SimpleNamespace(max_tokens=max_tokens, min_tokens=min_tokens, stop_token_ids=())
        kw.setdefault('arrival_time', float(self.num_steps))
        seq, *rest = [Sequence(seq_id + f'/{i}' * (i > 0), prompt, params, request_id=seq_id, index=i, stop_ids=frozenset(stop), **kw) for i in range(n)]
        self.scheduler.add(seq)
        self.seqs[seq_id], self.siblings[seq_id] = seq, rest
        return seq

    def fork(self, seq):
        "The siblings that start now, from the prompt that `seq` has just read; those without a seat queue"
        if seq.index or seq.num_output_tokens: return []
        forked = []
        for sibling in self.siblings.pop(seq.seq_id):
            self.seqs[sibling.seq_id] = sibling
            if self.scheduler.fork(seq, sibling): forked.append(sibling)
            else: self.scheduler.add(sibling)
        return forked

    def forward(self, seq, n):
        "Write n tokens and read the whole history back through the block table"
        bm, size, start = self.bm, self.bm.block_size, seq.num_computed_tokens
        end = start + n
        for p in range(start, end): self.memory[bm.slot(seq, p)] = seq.token_ids[p]
        history = [self.memory[s] for s in bm.slots(seq, 0, end)]
        assert POISON not in history, 'read what was never written'
        assert history == seq.token_ids[:end], 'read the K/V of somebody else'
        assert len(seq.block_table) == -(-end // size), 'blocks held are not those that the slots need'
        return self.model(history)          # logits, so to speak: `index` is the seed with which each sequence draws from them

    def step(self):
        self.num_steps += 1
        now, size = float(self.num_steps), self.bm.block_size
        out = self.scheduler.schedule(now)
        self.outputs.append(out)
        for src, dst in out.blocks_to_copy: self.memory[dst*size:(dst+1)*size] = self.memory[src*size:(src+1)*size]
        for b in out.new_blocks: self.memory[b*size:(b+1)*size] = [POISON] * size
        work = out.prefill_sequences + [(s, 1) for s in out.decode_sequences]
        assert len({s.seq_id for s, _ in work}) == len(work), 'a sequence is scheduled twice'
        assert sum(n for _, n in work) == out.num_batched_tokens <= self.scheduler.budget
        assert len(self.scheduler.running) <= self.scheduler.max_num_seqs
        tokens = {s.seq_id: self.forward(s, n) for s, n in work}
        assert {s.seq_id for s in out.sampled} == {s.seq_id for s, n in work if s.num_computed_tokens + n == s.num_tokens}
        self.scheduler.mark_computed(out)
        rows = [(s, tokens[seq.seq_id]) for seq in out.sampled for s in (seq, *self.fork(seq))]
        for seq, token in rows:
            seq.append_token((token + seq.index) % VOCAB, now)
            if end := seq.check_finished(self.max_model_len): self.scheduler.finish(seq, *end, now=now)
        self.bm.check_integrity(self.scheduler.sequences.values())
        return out

    def run(self, max_steps=20_000):
        "Until the queue is empty; no step may be empty before"
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished: break
            out = self.step()
            assert out.num_batched_tokens or out.preempted or out.outgrown, 'an empty step while work is pending'
        else: raise AssertionError('never finished')
        self.check_drained()
        return self

    def check_drained(self):
        s = self.scheduler
        self.bm.check_integrity([])
        assert self.bm.num_free_blocks == self.bm.num_blocks
        assert not (s.running or s.waiting or s.turns or s.sequences or s.ranks or any(lane.reading for lane in s.lanes))

    @property
    def num_preemptions(self): return sum(s.num_preemptions for s in self.seqs.values())
