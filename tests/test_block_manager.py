"The block manager: books that always balance, and the prefix-cache rows of the field cases that need no model."
import random
from types import SimpleNamespace

import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from minivllm import block_manager
from minivllm.block_manager import BlockManager, first_hash, hash_block
from minivllm.sequence import Sequence
from stub import StubEngine, reference


def prompt_of(n, seed=0):
    rng = random.Random(seed)
    return [rng.randrange(97) for _ in range(n)]


# ---- field cases

@pytest.mark.parametrize('k', [1, 2, 3, 5])
def test_PC1_full_hit(k):
    "A prompt of exactly k blocks, twice: at least one token is computed the second time"
    e, prompt = StubEngine(), prompt_of(4 * k)
    first = e.add(prompt)
    e.run()
    second = e.add(prompt)
    out = e.step()
    assert out.num_batched_tokens == 4 and second.num_cached_tokens == 4 * (k - 1) <= len(prompt) - 1
    e.run()
    assert first.output_token_ids == second.output_token_ids == reference(prompt, 8)


@pytest.mark.parametrize('n', range(1, 13))
def test_PC1_always_a_token_to_compute(n):
    e, prompt = StubEngine(), prompt_of(n)
    for _ in range(3):
        s = e.add(prompt, 3)
        e.run()
        assert s.num_cached_tokens <= n - 1 and s.output_token_ids == reference(prompt, 3)


def test_PC3_preempted_meets_its_own_blocks():
    "Two growing requests in a pool too small for both, cache on"
    e = StubEngine(num_blocks=8)
    seqs = [e.add(prompt_of(10, i), 18) for i in range(2)]
    e.run()
    assert e.num_preemptions > 0
    for i, s in enumerate(seqs): assert s.output_token_ids == reference(prompt_of(10, i), 18)


def test_PC3_resume_hits_cache():
    "A preempted request whose blocks are still there takes them back instead of computing them again"
    e = StubEngine(num_blocks=16, max_num_seqs=4)
    s = e.add(prompt_of(13), 12)
    for _ in range(4): e.step()
    e.scheduler.schedule(99.)                 # (to have a step to preempt in)
    e.scheduler._preempt(s, 99.)
    out = e.scheduler.schedule(100.)
    assert s.num_computed_tokens == 16 and s.num_cached_tokens == 0   # 16 tokens, 4 blocks; reported hits are those of the first time
    assert (out.prefill_sequences or [(out.decode_sequences[0], 1)])[0] == (s, s.num_tokens - 16)


def test_PC5_warm_up_ended_by_stop():
    "Batch A ends on stop tokens; batch B shares its prefixes and must answer as if cold"
    base = prompt_of(17)
    warm = StubEngine(num_blocks=64)
    for i in range(4):
        p = base + prompt_of(i, 50 + i)
        warm.add(p, 12, stop=reference(p, 3)[2:])
    warm.run()
    for cut in range(1, 18):
        p = base[:cut] + [5, 6, 7]
        s = warm.add(p, 8)
        warm.run()
        assert s.output_token_ids == reference(p, 8)


def test_PC6_every_split_of_the_hit():
    "P, P, P+suffix, P+other suffix, for every length of what is shared"
    for n in range(1, 14):
        e, p = StubEngine(num_blocks=32), prompt_of(n)
        for q in (p, p, p + [1, 2, 3], p + [9, 8, 7, 6, 5]):
            s = e.add(q, 5)
            e.run()
            assert s.output_token_ids == reference(q, 5)
        assert s.num_cached_tokens == n // 4 * 4


def test_PC7_prompt_logprobs_never_read_the_cache():
    e = StubEngine()
    for n in (3, 4, 5, 9):
        for _ in range(2):
            s = e.add(prompt_of(n), 1, skip_prefix_cache=True)
            assert e.step().num_batched_tokens == n and s.num_cached_tokens == 0
    e.check_drained()


def test_PC11_names_are_cryptographic():
    "Equal names mean equal contents: 32 bytes of SHA-256 over the whole history, checked against hashlib by hand"
    from array import array
    from hashlib import sha256
    name = hash_block(first_hash('salt'), [1, 2, 3, 4])
    assert name == sha256(sha256(b'salt').digest() + array('q', [1, 2, 3, 4]).tobytes()).digest() and len(name) == 32
    names = {hash_block(parent, [a, b]) for parent in (first_hash(), first_hash('x')) for a in range(40) for b in range(40)}
    assert len(names) == 2 * 40 * 40
    assert hash_block(first_hash(), [1, 23]) != hash_block(first_hash(), [12, 3])


def test_PC11_a_constant_hash_would_be_seen(monkeypatch):
    "The stub notices wrong blocks at once: with a broken hash it fails, so its silence elsewhere means something"
    monkeypatch.setattr(block_manager, 'hash_block', lambda parent, ids: b'same')
    e = StubEngine()
    e.add(prompt_of(9, 1), 2)
    e.run()
    e.add(prompt_of(9, 2), 2)
    with pytest.raises(AssertionError, match='somebody else'): e.run()


def test_PC12_opt_out():
    e, p = StubEngine(), prompt_of(11)
    e.add(p, 2)
    e.run()
    s = e.add(p, 2, skip_prefix_cache=True)
    assert e.step().num_batched_tokens == 11 and s.num_cached_tokens == 0
    t = e.add(p, 2)
    e.step()
    assert t.num_cached_tokens == 8
    e.run()


def test_PC12_salt_separates():
    e, p = StubEngine(), prompt_of(11)
    for salt, hit in [('a', 0), ('b', 0), ('a', 8), ('', 0), ('', 8)]:
        s = e.add(p, 2, cache_salt=salt)
        e.run()
        assert s.num_cached_tokens == hit


def test_PC12_cache_off():
    e, p = StubEngine(enable_prefix_caching=False), prompt_of(11)
    for _ in range(2):
        s = e.add(p, 2)
        e.run()
        assert s.num_cached_tokens == 0


def test_PC15_rows_of_unequal_length():
    e = StubEngine(num_blocks=64)
    seqs = [e.add(prompt_of(n, n), 9) for n in (1, 3, 5, 7, 11, 13)]
    e.run()
    for s in seqs: assert s.output_token_ids == reference(s.prompt_token_ids, 9)


@pytest.mark.parametrize('n', [3, 4, 5, 7, 8, 9])
@pytest.mark.parametrize('block_size', [1, 4, 16])
def test_PC16_blocks_held(n, block_size):
    "After each step: blocks held == ceil(computed / block). The newest sampled token has no slot yet"
    e = StubEngine(num_blocks=64, block_size=block_size)
    s = e.add(prompt_of(n), 3 * block_size + 2)
    while not s.is_finished:
        e.step()
        if s.is_finished: break
        assert s.num_uncomputed_tokens == 1 and len(s.block_table) == -(-s.num_computed_tokens // block_size)
    e.check_drained()


# ---- LRU, order, names

def test_lru_evicts_the_oldest_and_the_tail_first():
    bm = BlockManager(6, 2)
    def use(tokens):
        s = Sequence('s', tokens)
        assert bm.allocate(s, s.num_tokens - 2 * len(bm.match_prefix(s)))
        s.num_computed_tokens = s.num_tokens
        bm.publish(s)
        bm.free(s)
        return s
    def hit(tokens): return len(bm.match_prefix(Sequence('q', tokens + [0])))
    a, b = [1, 2, 3, 4], [5, 6, 7, 8]
    use(a), use(b)
    use(a + [9])                       # a again: now b is the older one (and a's fifth token took a plain block)
    assert (hit(a), hit(b)) == (2, 2)
    use([11, 12, 13])                  # two blocks, both of the plain ones
    assert (hit(a), hit(b)) == (2, 2)
    use([21, 22, 23, 24, 25])          # three: one plain, then b's tail, then b's head
    assert (hit(a), hit(b)) == (2, 0)
    bm.check_integrity([])


def test_names_are_kept_by_the_first():
    "The same text computed twice in one step: one name, and the other block is plain"
    bm = BlockManager(8, 2)
    x, y = Sequence('x', [1, 2, 3]), Sequence('y', [1, 2, 3])
    for s in (x, y): assert bm.allocate(s, 3)
    for s in (x, y):
        s.num_computed_tokens = 3
        bm.publish(s)
    assert len(bm.cached_blocks) == 1
    bm.free(x), bm.free(y)
    bm.check_integrity([])


def test_nothing_is_published_before_it_is_computed():
    bm = BlockManager(8, 2)
    x = Sequence('x', [1, 2, 3, 4, 5])
    assert bm.allocate(x, 5)
    bm.publish(x)
    assert not bm.cached_blocks and bm.match_prefix(Sequence('y', [1, 2, 3])) == []
    x.num_computed_tokens = 3
    bm.publish(x)
    assert len(bm.cached_blocks) == 1


def test_allocate_counts_revived_blocks():
    "A hit on free blocks uses up free blocks: all or nothing"
    bm = BlockManager(4, 2)
    x = Sequence('x', [1, 2, 3, 4, 5])
    assert bm.allocate(x, 5)
    x.num_computed_tokens = 5
    bm.publish(x)
    bm.free(x)
    y = Sequence('y', [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert len(bm.match_prefix(y)) == 2 and bm.num_blocks_needed(y, 5, bm.match_prefix(y)) == 5
    assert not bm.allocate(y, 5) and bm.num_free_blocks == 4 and y.block_table == []
    assert bm.allocate(y, 4) and y.num_cached_tokens == 4
    bm.check_integrity([y])


def test_reset_while_held():
    e = StubEngine(num_blocks=32)
    s = e.add(prompt_of(12), 20)
    for _ in range(5): e.step()
    e.bm.reset_prefix_cache()
    e.run()
    assert s.output_token_ids == reference(prompt_of(12), 20)


def test_hit_statistics_count_tokens_once():
    e = StubEngine(num_blocks=9)
    for i in range(3): e.add(prompt_of(8), 20)
    e.run()
    assert e.num_preemptions > 0 and e.bm.num_queried_tokens == 24


# ---- fork

def test_fork_copies_on_write_and_frees():
    bm = BlockManager(8, 4)
    p = Sequence('p', range(10))
    assert bm.allocate(p, 10)
    p.num_computed_tokens = 10
    bm.publish(p)
    kids = [Sequence(f'c{i}', range(10)) for i in range(3)]
    for c in kids: bm.fork(p, c)
    assert bm.num_free_blocks == 5 and bm.ref_counts[p.block_table[2]] == 4
    for s in [p, *kids]:
        s.append_token(1, now=0.)
        assert bm.allocate(s, 1)
        s.num_computed_tokens += 1
    copies, new = bm.take_orders()
    assert len(copies) == 3 and len({d for _, d in copies}) == 3 and not {d for _, d in copies} & set(new)
    assert len({s.block_table[2] for s in [p, *kids]}) == 4 and bm.num_free_blocks == 2
    bm.check_integrity([p, *kids])
    for s in [p, *kids]: bm.free(s)
    bm.check_integrity([])


def test_fork_has_room_or_changes_nothing():
    bm = BlockManager(2, 4)
    p, c = Sequence('p', range(6)), Sequence('c', range(6))
    assert bm.allocate(p, 6)
    p.num_computed_tokens = 6
    bm.fork(p, c)
    assert not bm.allocate(c, 1) and c.block_table == p.block_table and bm.blocks_to_copy == []
    bm.free(p)
    assert bm.allocate(c, 1) and bm.blocks_to_copy == []      # the only owner now
    bm.check_integrity([c])


def test_freed_copy_target_is_not_written():
    bm = BlockManager(3, 4)
    p, c = Sequence('p', range(6)), Sequence('c', range(6))
    assert bm.allocate(p, 6)
    p.num_computed_tokens = 6
    bm.fork(p, c)
    assert bm.allocate(c, 1) and len(bm.blocks_to_copy) == 1
    bm.free(c)
    assert bm.blocks_to_copy == []
    assert bm.take_orders()[0] == []


class Books(RuleBasedStateMachine):
    "Random allocate, grow, fork, free, reset against a memory that remembers every token: nobody ever reads a wrong one"
    def __init__(self):
        super().__init__()
        self.bm = BlockManager(10, 2)
        self.memory, self.seqs, self.count = {}, [], 0

    def apply(self, seq, n):
        copies, new = self.bm.take_orders()
        for s, d in copies:
            for k in range(2): self.memory[d*2+k] = self.memory.get(s*2+k)
        for b in new:
            for k in range(2): self.memory[b*2+k] = None
        for p in range(seq.num_computed_tokens, seq.num_computed_tokens + n): self.memory[self.bm.slot(seq, p)] = seq.token_ids[p]
        seq.num_computed_tokens += n
        self.bm.publish(seq)

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9), data=st.data())
    def start(self, tokens, data):
        self.count += 1
        seq = Sequence(str(self.count), tokens, cache_salt=data.draw(st.sampled_from(['', 'x'])))
        n = data.draw(st.integers(1, len(tokens) - 2 * len(self.bm.match_prefix(seq))))
        before = self.bm.num_free_blocks
        if self.bm.allocate(seq, n):
            self.apply(seq, n)
            self.seqs.append(seq)
        else: assert self.bm.num_free_blocks == before and not seq.block_table

    @precondition(lambda self: self.seqs)
    @rule(data=st.data(), token=st.integers(0, 1))
    def grow(self, data, token):
        seq = data.draw(st.sampled_from(self.seqs))
        if seq.num_uncomputed_tokens == 0: seq.append_token(token, now=0.)
        if self.bm.allocate(seq, 1): self.apply(seq, 1)

    @precondition(lambda self: self.seqs)
    @rule(data=st.data())
    def fork(self, data):
        parent = data.draw(st.sampled_from(self.seqs))
        self.count += 1
        child = Sequence(str(self.count), parent.token_ids, cache_salt=parent.cache_salt)
        self.bm.fork(parent, child)
        self.seqs.append(child)

    @precondition(lambda self: self.seqs)
    @rule(data=st.data())
    def stop(self, data):
        seq = data.draw(st.sampled_from(self.seqs))
        self.seqs.remove(seq)
        self.bm.free(seq)

    @rule()
    def reset(self): self.bm.reset_prefix_cache()

    @invariant()
    def balanced(self):
        self.bm.check_integrity(self.seqs)
        for seq in self.seqs:
            n = seq.num_computed_tokens
            assert [self.memory[s] for s in self.bm.slots(seq, 0, n)] == seq.token_ids[:n]


Books.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestBooks = Books.TestCase


@given(st.lists(st.integers(0, 30), min_size=1, max_size=40), st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_blocks_for_is_ceil(ns, size):
    bm = BlockManager(4, size)
    for n in ns:
        assert (bm.blocks_for(n) - 1) * size < n <= bm.blocks_for(n) * size or n == 0 == bm.blocks_for(0)
        assert bm.can_ever_fit(n) == (n <= 4 * size)


def test_drawings_are_repeatable():
    bm = BlockManager(300, 4)
    s = Sequence('<s>', range(9))
    bm.allocate(s, 9)
    html = bm.draw(s)._repr_html_()
    assert html == bm.draw(s)._repr_html_() and 'and 44 more' in html and ' at 0x' not in repr(bm) and '<s>' not in html
