"""Structured output: whatever the model would like to say, the answer has the form that was asked for, and nobody else notices."""
import json
import random
import re

import jsonschema
import pytest
import torch

from minivllm import LLM, SamplingParams, StructuredOutputsParams
from minivllm.sampler import Sampler
from minivllm.sequence import Sequence
from minivllm.structured import Grammars, allowed, closed
from minivllm.tokens import Tokenizer
from ref import drained, poison
from tiny import byte_fallback_tokenizer, bytes_tokenizer, tiny_llama

GBNF = 'root ::= "(" root ")" | [a-c]+'
SPECS = dict(
    choice=(dict(choice=['yes', 'no', 'no way', 'né"\n🙂\\']), ['yes', 'no', 'no way', 'né"\n🙂\\'].__contains__),
    regex=(dict(regex='(ab|the cat)+[0-9]{0,3}'), re.compile('(ab|the cat)+[0-9]{0,3}').fullmatch),
    anchored=(dict(regex='^[^a-z]{2,4}$'), re.compile('[^a-z]{2,4}').fullmatch),
    grammar=(dict(grammar=GBNF), lambda t: re.fullmatch(r'(\(*)[a-c]+(\)*)', t) and t.count('(') == t.count(')')),
    lark=(dict(grammar='start: "a" B\nB: /[0-9]{1,4}/'), re.compile('a[0-9]{1,4}').fullmatch),
    json=(dict(json={'type': 'object', 'properties': {'a': {'type': 'integer', 'minimum': -5, 'maximum': 500}, 'b': {'type': 'string', 'maxLength': 5}},
                     'required': ['a', 'b']}, disable_any_whitespace=True, disable_additional_properties=True),
          lambda t: set(json.loads(t)) == {'a', 'b'} and -5 <= json.loads(t)['a'] <= 500 and len(json.loads(t)['b']) <= 5))


def asks(**kw): return StructuredOutputsParams(**kw)
def prompt(n, seed=0): return [random.Random(seed).randrange(3, 290) for _ in range(n)]


@pytest.fixture(scope='module')
def folders(tmp_path_factory):
    make = lambda kind, size: tiny_llama(tmp_path_factory.mktemp(kind), tokenizer=kind, vocab_size=size)
    return dict(bytes=make('bytes', 310), byte_fallback=make('byte_fallback', 320))             # both with rows of padding


@pytest.fixture(scope='module', params=['bytes', 'byte_fallback'])
def folder(folders, request): return folders[request.param]


def engine(folder, **kw): return poison(LLM(str(folder), **dict(dtype='float32', block_size=4, num_blocks=128) | kw))


# --- the mask alone

@pytest.mark.parametrize('make', [bytes_tokenizer, byte_fallback_tokenizer])
@pytest.mark.parametrize('name', SPECS)
def test_random_walks_end_in_valid_texts(make, name):
    "Any path through the masks is a valid answer, and it may end exactly where it is one."
    tokenizer = Tokenizer(*make())
    spec, valid = SPECS[name]
    size = tokenizer.vocab_size + 9
    grammars, rng = Grammars(tokenizer, size, {2}), random.Random(0)
    seen = set()
    for walk in range(30):
        m, said = grammars.matcher(asks(**spec)), b''
        for step in range(60):
            ids = allowed([m], size)[0].nonzero()[:, 0].tolist()
            assert ids and m.is_complete == (2 in ids) and max(ids) < tokenizer.vocab_size and not set(ids) & (tokenizer.special_ids - {2})
            if 2 in ids:
                assert valid(said.decode())
                if len(ids) == 1 or rng.random() < .3: break
            token = rng.choice([i for i in ids if i != 2])
            said += tokenizer.token_bytes(token)
            assert m.advance(token) is None
        seen.add(said)
    assert len(seen) > 2


def test_eos_exactly_where_complete():
    tokenizer = Tokenizer(*bytes_tokenizer())
    g = Grammars(tokenizer, tokenizer.vocab_size, {0, 2})
    m, said = g.matcher(asks(regex='a{2,4}|b'), stop_ids={2, 3, 70}), ''
    a = tokenizer.encode('a')[0]
    for n in range(5):
        mask = allowed([m], 300)[0]
        assert [mask[i].item() for i in (0, 2, 3, 70, a)] == [n >= 2] * 3 + [False, n < 4]       # 3 is special and a stop token, 70 is text
        m.advance(a)


def test_text_of_special_tokens_is_text():
    "A grammar that spells the text of a special token gets its letters, never the token."
    tokenizer = Tokenizer(*bytes_tokenizer())
    g = Grammars(tokenizer, 300, {2})
    m, ids = g.matcher(asks(choice=['<|im_end|>'])), []
    while (ok := allowed([m], 300)[0].nonzero()[:, 0].tolist()) != [2]:
        ids.append(ok[0])
        m.advance(ok[0])
    assert 2 not in ids and b''.join(map(tokenizer.token_bytes, ids)) == b'<|im_end|>'


def test_other_kinds_of_tokenizers_are_refused():
    from tokenizers import Tokenizer as Backend, decoders, models
    backend = Backend(models.WordPiece({'[UNK]': 0, 'a': 1, '##b': 2}, unk_token='[UNK]'))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ValueError, match='tokens are bytes'): Grammars(Tokenizer(backend, {}), 3, {0}).matcher(asks(regex='a'))


def test_compiled_once():
    g = Grammars(Tokenizer(*bytes_tokenizer()), 300, {2})
    first, second = (g.matcher(asks(json={'type': 'integer'})) for _ in range(2))
    assert g.compile.cache_info()[:2] == (1, 1)
    first.advance(Tokenizer(*bytes_tokenizer()).encode('1')[0])
    assert first.is_complete and not second.is_complete


@pytest.mark.parametrize('schema', [{'properties': {'a': {'properties': {'b': {}}}}}, {'$defs': {'x': {'patternProperties': {'^a': {}}}}, '$ref': '#/$defs/x'},
                                    {'anyOf': [{'properties': {}}, {'type': 'array', 'items': {'properties': {'const': {'properties': {}}}}}]}])
def test_closed_reaches_every_object(schema):
    assert json.dumps(closed(schema)).count('"additionalProperties": false') == json.dumps(schema).count('roperties"')


# --- in the engine

@pytest.mark.parametrize('name', SPECS)
def test_answers_have_the_form(folder, name):
    spec, valid = SPECS[name]
    llm = engine(folder)
    params = [SamplingParams(temperature=t, seed=i, max_tokens=60, structured_outputs=asks(**spec)) for i, t in enumerate([0, 1, 1, 3, 3])]
    for out in llm.generate([prompt(5 + i, i) for i in range(5)], params, use_tqdm=False):
        o = out.outputs[0]
        assert o.finish_reason == 'length' or o.finish_reason == 'stop' and valid(o.text) and o.stop_reason is None
    drained(llm)


def test_json_object(folder):
    llm = engine(folder)
    outs = llm.generate([prompt(4, i) for i in range(4)], SamplingParams(seed=1, max_tokens=200, structured_outputs=asks(json_object=True)), use_tqdm=False)
    done = [o.outputs[0].text for o in outs if o.outputs[0].finish_reason == 'stop']
    assert all(isinstance(json.loads(t), dict) for t in done) and all(o.outputs[0].text.lstrip()[:1] == '{' for o in outs)


MIX = [dict(structured_outputs=asks(**SPECS[n][0])) for n in SPECS] + [{}] * 6


def mixed(llm, order=None):
    "Answers of constrained and free requests in one batch, by their number."
    jobs = [(prompt(6 + i % 5, i), SamplingParams(temperature=i % 2, seed=i, max_tokens=24, **kw)) for i, kw in enumerate(MIX)]
    order = list(range(len(jobs))) if order is None else order
    outs = llm.generate([jobs[i][0] for i in order], [jobs[i][1] for i in order], use_tqdm=False)
    return {i: o.outputs[0].token_ids for i, o in zip(order, outs)}, sum(o.metrics.num_preemptions for o in outs)


def test_company_does_not_matter(folder):
    llm = engine(folder)
    want, _ = mixed(llm)
    for order in [[i] for i in range(len(MIX))] + [list(range(len(MIX)))[::-1]]:
        got, _ = mixed(llm, order)
        assert got == {i: want[i] for i in order}
    drained(llm)


@pytest.mark.parametrize('where', [dict(num_blocks=20), dict(num_blocks=24, max_num_batched_tokens=5), dict(num_blocks=20, enable_prefix_caching=False)])
def test_preemption_does_not_matter(folder, where):
    want, _ = mixed(engine(folder))
    narrow = engine(folder, **where)
    got, preempted = mixed(narrow)
    assert preempted > 0 and got == want
    drained(narrow)


def test_each_of_n_answers_has_a_matcher_of_its_own(folder):
    llm, shape = engine(folder), asks(regex='[ab]{3}(x|y){1,3}')
    [out] = llm.generate([prompt(9)], SamplingParams(n=6, seed=3, temperature=5, max_tokens=20, structured_outputs=shape), use_tqdm=False)
    texts = [o.text for o in out.outputs]
    assert all(re.fullmatch('[ab]{3}(x|y){1,3}', t) for t in texts) and len(set(texts)) > 2
    alone = engine(folder, max_num_seqs=1).generate([prompt(9)], SamplingParams(n=6, seed=3, temperature=5, max_tokens=20, structured_outputs=shape), use_tqdm=False)
    assert [o.token_ids for o in alone[0].outputs] == [o.token_ids for o in out.outputs]
    drained(llm)


def test_streaming_and_aborting(folder):
    llm = engine(folder)
    deltas = list(llm.stream(prompt(5), SamplingParams(seed=1, structured_outputs=asks(choice=['a 🙂 b']))))
    assert ''.join(d.text for d in deltas) == 'a 🙂 b' == deltas[-1].output.outputs[0].text
    stream = llm.stream(prompt(5), SamplingParams(structured_outputs=asks(regex='a{9}')))
    next(stream)
    stream.close()
    drained(llm)


# --- with other parameters

def ask(llm, shape, n=30, temperature=0, **kw):
    return llm.generate([prompt(6)], SamplingParams(temperature=temperature, max_tokens=n, structured_outputs=shape, **kw), use_tqdm=False)[0].outputs[0]


def test_max_tokens_cuts(folder):
    o = ask(engine(folder), asks(regex='a{40}'), n=5, bad_words=['aa'])
    assert (o.finish_reason, len(o.token_ids)) == ('length', 5) and set(o.text) == {'a'}


def test_min_tokens_goes_on_where_the_grammar_can(folder):
    llm = engine(folder)
    eos = llm.tokenizer.eos_token_id
    o = ask(llm, asks(regex='[0-9]+'), min_tokens=6, logit_bias={eos: 100})
    assert len(o.token_ids) == 7 and o.token_ids[-1] == eos and re.fullmatch('[0-9]{6,}', o.text)
    o = ask(llm, asks(choice=['q']), min_tokens=6)
    assert (o.text, o.finish_reason, o.stop_reason) == ('q', 'stop', None) and len(o.token_ids) == 2


def test_bad_words_among_what_is_allowed(folders):
    llm = engine(folders['bytes'])
    assert ask(llm, asks(regex='[xyz]{3}'), bad_words=['x', 'y']).text == 'zzz'
    assert ask(llm, asks(regex='x{3}'), bad_words=['x']).text == 'xxx'                          # nothing else would be left


def test_bias_and_penalties_choose_among_what_is_allowed(folder):
    llm = engine(folder)
    x = llm.tokenizer.encode('z', add_special_tokens=False)[-1]
    assert ask(llm, asks(regex='[xz]{3}'), logit_bias={x: 100, 50: 100}).text == 'zzz'
    o = ask(llm, asks(regex='[xyz]{12}'), repetition_penalty=1.5, presence_penalty=2., frequency_penalty=2., temperature=1, top_k=2, top_p=.9, min_p=.01, seed=0)
    assert re.fullmatch('[xyz]{12}', o.text) and len(set(o.text)) == 3


def test_stops_end_early(folder):
    llm = engine(folder)
    o = ask(llm, asks(choice=['one; two']), stop=[';'])
    assert (o.text, o.finish_reason, o.stop_reason) == ('one', 'stop', ';')
    semicolon = llm.tokenizer.encode('x;', add_special_tokens=False)[-1]
    o = ask(llm, asks(choice=['one; two']), stop_token_ids=[semicolon])
    assert (o.text, o.finish_reason, o.stop_reason) == ('one', 'stop', semicolon)
    special = min(llm.tokenizer.special_ids - {llm.tokenizer.eos_token_id})
    o = ask(llm, asks(regex='[0-9]{2,5}'), stop_token_ids=[special], logit_bias={special: 100})
    assert len(o.text) == 2 and (o.finish_reason, o.stop_reason) == ('stop', special)


def test_logprobs_are_those_of_the_raw_logits(folder):
    llm = engine(folder)
    free = llm.generate([prompt(6)], SamplingParams(temperature=0, max_tokens=1, logprobs=-1), use_tqdm=False)[0].outputs[0].logprobs[0]
    bound = ask(llm, asks(regex='[ab]+'), n=1, logprobs=-1).logprobs[0]
    assert {t: p.logprob for t, p in bound.items()} == pytest.approx({t: p.logprob for t, p in free.items()}, abs=5e-5)
    assert min(p.rank for p in bound.values()) == 1


@pytest.mark.parametrize('bad, words', [
    (dict(regex='(a'), 'structured_outputs.regex cannot be compiled.*unclosed group'), (dict(regex='(?<=a)b'), 'look-around'), (dict(grammar='root ::= x'), "'x' not found"),
    (dict(grammar='start: x'), 'unknown name'), (dict(grammar='what'), 'structured_outputs.grammar cannot'), (dict(grammar='start: start "a"'), 'no text matches it'),
    (dict(json={'type': 'text'}), 'Invalid type'), (dict(json={'not': {}}), 'Unimplemented keys'), (dict(json={'enum': []}), 'Unsatisfiable'),
    (dict(json={'$ref': 'https://example.com/schema'}), 'structured_outputs.json cannot'), (dict(json={'pattern': '('}), 'regex parse error'),
    (dict(json={'type': 'string', 'enum': [1]}), 'Unsatisfiable'), (dict(json=json.loads('{"items":' * 300 + '{}' + '}' * 300)), 'recursion')])
def test_what_cannot_be_compiled_is_refused_at_the_door(folders, bad, words):
    llm = engine(folders['bytes'])
    llm.add_request(prompt(4), SamplingParams(max_tokens=3), 'fine')
    with pytest.raises(ValueError, match=words): llm.add_request(prompt(5), SamplingParams(n=3, structured_outputs=asks(**bad)), 'bad')
    assert list(llm.requests) == ['fine'] and len(llm.scheduler.waiting) == 1
    with pytest.raises(ValueError, match='cannot be compiled'): llm.generate([prompt(3), prompt(4)], [SamplingParams(), SamplingParams(structured_outputs=asks(**bad))])
    assert list(llm.requests) == ['fine']
    llm.abort_request('fine')
    drained(llm)


def test_without_the_library(folders, monkeypatch):
    import sys
    monkeypatch.setitem(sys.modules, 'llguidance', None)
    llm = engine(folders['bytes'])
    with pytest.raises(ValueError, match=r"pip install 'minivllm\[structured\]'"): llm.add_request(prompt(4), SamplingParams(structured_outputs=asks(regex='a')))
    assert len(llm.generate([prompt(4)], SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)[0].outputs[0].token_ids) == 3
    drained(llm)


def test_library_is_imported_only_when_used():
    import subprocess
    import sys
    code = 'import sys, minivllm.engine, minivllm.cli; from minivllm.structured import Grammars; print("llguidance" in sys.modules)'
    assert subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True).stdout == 'False\n'


def test_a_grammar_too_hard_ends_its_own_answer_only(folders, monkeypatch):
    import llguidance
    real = llguidance.LLParserLimits
    monkeypatch.setattr(llguidance, 'LLParserLimits', lambda **kw: real(step_max_items=60, **kw))
    llm = engine(folders['bytes'])
    hard = asks(grammar='start: x x x\nx: ("a" | "aa" | "aaa")*')
    params = [SamplingParams(temperature=0, max_tokens=20, structured_outputs=s, logit_bias={68: 100}) for s in (hard, None, asks(regex='a{12}'))]
    outs = [o.outputs[0] for o in llm.generate([prompt(5)] * 3, params, use_tqdm=False)]
    assert outs[0].finish_reason == 'error' and 'Too many items' in outs[0].stop_reason and set(outs[0].text) <= {'a'}
    assert outs[1].finish_reason == 'length' and outs[2].text == 'a' * 12
    drained(llm)


def test_rows_of_a_batch_are_masked_alone():
    "Bit for bit: a free row between constrained ones is sampled as if it were alone."
    tokenizer = Tokenizer(*bytes_tokenizer())
    g, logits = Grammars(tokenizer, 300, {2}), torch.randn(6, 300, generator=torch.Generator().manual_seed(0))
    def seq(i):
        s = Sequence(str(i), [5], SamplingParams(temperature=1, seed=i, structured_outputs=asks(regex='[a-f]') if i % 2 else None), seed=i, stop_ids={2})
        if i % 2: s.matcher = g.matcher(s.params.structured_outputs, s.stop_ids)
        return s
    before = logits.clone()
    together = Sampler()(logits, [seq(i) for i in range(6)]).token_ids
    assert torch.equal(before, logits) and together == [Sampler()(logits[i:i+1], [seq(i)]).token_ids[0] for i in range(6)]
    assert all(tokenizer.token_text(t) in 'abcdef' for t in together[1::2])


# --- the demo model

def random_schema(rng, depth=0):
    "A schema whose answers are short, and end."
    kinds = ['integer', 'boolean', 'null', 'enum', 'const', 'string', 'pattern', 'format', 'choice'] + ['object', 'array'] * (2 if depth < 2 else 0)
    kind = 'object' if depth == 0 and rng.random() < .7 else rng.choice(kinds)
    low = rng.randrange(-50, 50)
    match kind:
        case 'integer': return {'type': 'integer', 'minimum': low, 'maximum': low + rng.randrange(1000)}
        case 'boolean' | 'null': return {'type': kind}
        case 'enum': return {'enum': rng.sample(['red', 'größe', '🙂', 1, 2.5, None, True, 'a "quoted" one', ['x'], {'k': 1}], rng.randrange(1, 4))}
        case 'const': return {'const': rng.choice([7, 'fixed', [1, 2], {'a': None}])}
        case 'string': return {'type': 'string', 'minLength': rng.randrange(2), 'maxLength': rng.randrange(2, 9)}
        case 'pattern': return {'type': 'string', 'pattern': rng.choice(['^[a-z]{2,6}$', '^[0-9]{3}-[0-9]{2}$', '^(yes|no|maybe)$', '^[A-Z][a-z]{1,5}$'])}
        case 'format': return {'type': 'string', 'format': rng.choice(['ipv4', 'uuid'])}
        case 'choice': return {'anyOf': [{'type': 'integer', 'minimum': 0, 'maximum': 9}, {'type': 'string', 'maxLength': 3}, {'type': 'null'}]}
        case 'array': return {'type': 'array', 'items': random_schema(rng, depth + 1), 'minItems': rng.randrange(2), 'maxItems': rng.randrange(1, 3)}
    names = rng.sample(['name', 'age', 'tags', 'size', 'kind of "thing"', 'é', 'id', 'next'], rng.randrange(1, 4))
    return {'type': 'object', 'properties': {n: random_schema(rng, depth + 1) for n in names}, 'required': rng.sample(names, rng.randrange(len(names) + 1)), 'additionalProperties': False}


FREE = ['The capital of France is', 'Once upon a time,', 'def fibonacci(n):', '从前有座山，', '1, 2, 3, 4,', 'Dear Sir or Madam,']


def test_200_random_schemas_among_free_requests():
    rng = random.Random(0)
    schemas = [random_schema(rng) for _ in range(200)]
    constrained = [SamplingParams(temperature=rng.choice([0, .7, 1]), seed=i, max_tokens=250, structured_outputs=asks(json=s, disable_any_whitespace=True)) for i, s in enumerate(schemas)]
    free = [SamplingParams(temperature=i % 2, top_k=8, seed=i, max_tokens=12) for i in range(len(FREE))]    # few tokens: a draw among all 49,152 can turn on the last bit of a logit
    jobs = [('JSON: ', p) for p in constrained]
    places = [1, 30, 70, 110, 150, 190]
    for at, job in zip(places, zip(FREE, free)): jobs.insert(at, job)
    with LLM(dtype='float32', max_num_seqs=64, num_blocks=1200) as llm:
        outs = [o.outputs[0] for o in llm.generate(*map(list, zip(*jobs)), use_tqdm=False)]
        alone = [llm.generate(*job, use_tqdm=False)[0].outputs[0].text for job in zip(FREE, free)]
        drained(llm)
    assert [outs[i].text for i in places] == alone
    for o, (_, p) in zip(outs, jobs):
        if not p.structured_outputs: continue
        assert o.finish_reason == 'stop', (p, o.text)
        jsonschema.validate(json.loads(o.text), p.structured_outputs.json, format_checker=jsonschema.FormatChecker())
    assert len({o.text for o in outs}) > 120
