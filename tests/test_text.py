"Tokenizer, chat templates, detokenization and stop strings; the TX rows at the level of one detokenizer."
import json, random
import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import AddedToken, Tokenizer as HF, decoders, models, normalizers, pre_tokenizers, processors, trainers
from minivllm.tokens import IncrementalDetokenizer, StopStrings, Tokenizer, byte_alphabet

CORPUS = ['The capital of France is Paris.', 'def f(x):\n    return x + 1\n', '你好，世界。今天天气很好。', 'naïve café — “quoted” 👋🏽 👩‍🚀 🇫🇷', '  spaces   and\ttabs ', 'ABC DEFGHIJ User: stop']
BYTES = [f'<0x{b:02X}>' for b in range(256)]
LLAMA = [decoders.Replace('▁', ' '), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(' ', 1, 0)]

def byte_level(add_prefix_space=False, size=400, special=('<|end|>',)):
    t = HF(models.BPE())
    t.pre_tokenizer, t.decoder = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space), decoders.ByteLevel()
    t.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=size, special_tokens=list(special), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    t.add_tokens([AddedToken('<think>', special=False, normalized=False), AddedToken('thé', special=False)])
    return Tokenizer(t, {'eos_token': '<|end|>'})

def sentencepiece(decoder=None, prepend=True):
    words = ['▁', '▁Paris', '▁is', '▁the', 'a', 'b', 's', 'é', '你', '▁▁', 'x▁y', 'ABC', 'DEF', 'G', 'HI', 'J']
    vocab = {t: i for i, t in enumerate(['<unk>', '<s>', '</s>'] + BYTES + words)}
    t = HF(models.BPE(vocab, [], unk_token='<unk>', fuse_unk=True, byte_fallback=True))
    steps = [normalizers.Replace(' ', '▁')]
    t.normalizer = normalizers.Sequence([normalizers.Prepend('▁')] * prepend + steps)
    t.decoder = decoder or decoders.Sequence(LLAMA)
    t.add_special_tokens(['<unk>', '<s>', '</s>'])
    t.post_processor = processors.TemplateProcessing(single='<s> $A', special_tokens=[('<s>', t.token_to_id('<s>'))])
    return Tokenizer(t, {'bos_token': '<s>', 'eos_token': '</s>', 'unk_token': '<unk>'})

def words(decoder=None):
    t = HF(models.WordLevel({w: i for i, w in enumerate(['[E]', 'the', 'cat', '##s', 'sat', '你好', '.'])}, unk_token='[E]'))
    t.pre_tokenizer = pre_tokenizers.Whitespace()
    if decoder: t.decoder = decoder
    return Tokenizer(t, {'eos_token': '[E]'})

ZOO = dict(byte_level=byte_level(), prefix_space=byte_level(True), llama=sentencepiece(), gemma=sentencepiece(decoders.Sequence(LLAMA[:3]), False), metaspace=sentencepiece(decoders.Metaspace()),
           metaspace_never=sentencepiece(decoders.Metaspace(prepend_scheme='never')), strip_two=sentencepiece(decoders.Sequence(LLAMA[:3] + [decoders.Strip(' ', 2, 0)])),
           no_decoder=words(), fuse=words(decoders.Fuse()), wordpiece=words(decoders.WordPiece(cleanup=False)))
every_tokenizer = pytest.mark.parametrize('tok', ZOO.values(), ids=ZOO.keys())

def run(tok, output, prompt=(), **kw):
    detok = IncrementalDetokenizer(tok, list(prompt), **kw)
    deltas = [detok.append(i) for i in output]
    return detok, deltas + [detok.flush()]

def answer_part(tok, prompt, output, skip=True):
    "decode(all) minus the prompt's part; a character that the prompt began and the output completed is the output's"
    before, full = tok.decode(prompt, skip), tok.decode(prompt + output, skip)
    return full[len(before):] if full.startswith(before) else full[len(before) - 1:]

def ids_of(tok): return st.lists(st.integers(0, tok.vocab_size + 3), max_size=14)

# --- properties, over all kinds of tokenizer ---

@every_tokenizer
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_deltas_join_to_full_decode(tok, data):
    prompt, output, skip = data.draw(ids_of(tok)), data.draw(ids_of(tok)), data.draw(st.booleans())
    detok, deltas = run(tok, output, prompt, skip_special_tokens=skip)
    assert ''.join(deltas) == detok.text == answer_part(tok, prompt, output, skip)

@every_tokenizer
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_stop_cut(tok, data):
    output = data.draw(ids_of(tok))
    full = tok.decode(output)
    stops = data.draw(st.lists(st.text(alphabet=full or 'a', min_size=1, max_size=3), min_size=1, max_size=3))
    include = data.draw(st.booleans())
    detok, deltas = run(tok, output, stop=stops, include_stop_str_in_output=include)
    ends = [(full.find(s) + len(s), k, s) for k, s in enumerate(stops) if s in full]
    if not ends:
        assert detok.stopped is None and ''.join(deltas) == full
        return
    end, _, stop = min(ends)
    assert detok.stopped == stop
    assert ''.join(deltas) == detok.text == full[:end if include else end - len(stop)]

@pytest.mark.parametrize('tok', [ZOO['byte_level'], ZOO['prefix_space'], ZOO['no_decoder'], ZOO['fuse'], ZOO['wordpiece'], ZOO['metaspace'], ZOO['metaspace_never']])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_decode_equals_library(tok, data):
    ids, skip = data.draw(ids_of(tok)), data.draw(st.booleans())
    assert tok.decode(ids, skip) == tok.backend.decode(ids, skip_special_tokens=skip)

@pytest.mark.parametrize('name', ['llama', 'gemma', 'strip_two', 'byte_level', 'prefix_space'])
@settings(max_examples=150, deadline=None)
@given(text=st.text(alphabet='ab sé你😀▁\n', max_size=12))
def test_round_trip_equals_library(name, text):
    tok = ZOO[name]
    ids = tok.encode(text)
    assert tok.decode(ids) == tok.backend.decode(ids)

@settings(max_examples=200, deadline=None)
@given(texts=st.lists(st.text(alphabet='ab', max_size=4), max_size=8), stops=st.lists(st.text(alphabet='ab', min_size=1, max_size=4), min_size=1, max_size=3))
def test_only_what_could_become_a_stop_is_held(texts, stops):
    matcher, shown, seen = StopStrings(stops), '', ''
    for t in texts:
        shown += matcher.feed(t)
        if matcher.matched: return
        seen += t
        longest = max((n for s in stops for n in range(len(s)) if seen.endswith(s[:n])), default=0)
        assert shown == seen[:len(seen) - longest]

def test_linear_in_the_output():
    tok, counted = sentencepiece(), []
    real = tok.token_bytes
    tok.token_bytes = lambda i: counted.append(i) or real(i)
    detok = IncrementalDetokenizer(tok, [1] + [7] * 5000, stop=['never this'])
    for i in range(2000): detok.append(3 + i % 250)
    assert len(counted) <= 2000 + 5
    word = words()
    decode, sizes = word.backend.decode, []
    class Counting:
        id_to_token = word.backend.id_to_token
        def decode(self, ids, **kw): sizes.append(len(ids)); return decode(ids, **kw)
    word.backend = Counting()
    detok = IncrementalDetokenizer(word, [1] * 5000)
    for i in range(500): detok.append(1 + i % 6)
    assert max(sizes) <= 10 and len(sizes) <= 1000

# --- the rows of cases.md ---

@pytest.mark.parametrize('tok', [ZOO['byte_level'], ZOO['llama']], ids=['byte_level', 'byte_fallback'])
@pytest.mark.parametrize('begun', [1, 2])
def test_TX1_prompt_ends_inside_a_character(tok, begun):
    byte = (lambda b: tok.backend.token_to_id(BYTES[b])) if tok is ZOO['llama'] else (lambda b: tok.backend.token_to_id(next(c for c, v in byte_alphabet.items() if v == b)))
    ids = [byte(b) for b in 'long prompt 好'.encode()]
    cut = len(ids) - 3 + begun
    after = [byte(ord('!'))]
    detok, deltas = run(tok, ids[cut:] + after, ids[:cut])
    assert deltas == [''] * (2 - begun) + ['好', '!', '']
    detok, deltas = run(tok, after, ids[:cut]) # does not complete it
    assert ''.join(deltas) == '!' == answer_part(tok, ids[:cut], after)
    assert run(tok, [], ids[:cut])[1] == ['']  # says nothing

@pytest.mark.parametrize('name', ['byte_level', 'llama'])
@pytest.mark.parametrize('kept', [1, 2, 3])
def test_TX3_cut_in_mid_character(name, kept):
    tok = ZOO[name]
    byte = lambda b: tok.backend.token_to_id(BYTES[b] if name == 'llama' else next(c for c, v in byte_alphabet.items() if v == b))
    output = [byte(b) for b in ('a'.encode() + '😀'.encode()[:kept])]
    detok, deltas = run(tok, output, [byte(ord('p'))])
    assert deltas == ['a'] + [''] * kept + ['�'] and detok.num_tokens == kept + 1
    json.dumps(detok.text).encode()
    assert detok.flush() == '' # a second flush adds nothing

@pytest.mark.parametrize('name', ['byte_level', 'prefix_space', 'llama', 'gemma', 'strip_two'])
@pytest.mark.parametrize('text', ['é', '你好世界', '😀👋🏽', '👩‍🚀👨‍👩‍👧', '🇫🇷', 'aé你😀b', '�', 'a�b'])
def test_TX4_characters_of_several_bytes(name, text):
    tok = ZOO[name]
    output = tok.encode(text, add_special_tokens=False)
    detok, deltas = run(tok, output, tok.encode('x'))
    assert ''.join(deltas).strip(' ') == text and detok.text == answer_part(tok, tok.encode('x'), output)
    if '�' not in text: assert not any('�' in d for d in deltas)

@every_tokenizer
def test_TX6_complete_tokens_are_released_at_once(tok):
    rng = random.Random(0)
    plain = [i for i in range(tok.vocab_size) if i not in tok.special_ids and tok.token_text(i).strip() and tok.token_text(i).isascii()]
    output = [rng.choice(plain) for _ in range(20)]
    _, deltas = run(tok, output, [plain[0]])
    assert all(deltas[:-1]) and deltas[-1] == ''
    _, deltas = run(tok, output, [plain[0]], stop=['\x00never'])
    assert all(deltas[:-1])

def test_TX7_partial_stop_is_not_shown():
    tok = ZOO['llama']
    output = [tok.backend.token_to_id(t) for t in ('ABC', 'DEF', 'G', 'HI', 'J', 'ABC')]
    detok, deltas = run(tok, output, [tok.bos_token_id, output[0]], stop=['DEFGHIJ'])
    assert deltas == ['ABC', '', '', '', '', '', ''] and detok.stopped == 'DEFGHIJ' and detok.text == 'ABC'
    detok, deltas = run(tok, output[:4], [output[0]], stop=['DEFGHIJ']) # ends before the stop is complete: flushed
    assert deltas == ['ABC', '', '', '', 'DEFGHI'] and detok.stopped is None
    detok, deltas = run(tok, output, [output[0]], stop='DEFGHIJ', include_stop_str_in_output=True)
    assert deltas == ['ABC', 'DEF', 'G', 'HI', 'J', '', '']

def test_TX9_only_a_possible_stop_is_held():
    tok = ZOO['byte_level']
    output = tok.encode('The cat sat. Use')
    stops = ['\n\nHuman: a very long stop string indeed', '<|very long end of everything|>', 'User:']
    detok, deltas = run(tok, output, stop=stops)
    free = next(n for n in range(len(output)) if tok.decode(output[:n + 1]).endswith('U') or 'U' in tok.decode(output[:n + 1])[-3:])
    assert all(deltas[:free]) and ''.join(deltas[:-1]) == 'The cat sat. ' and deltas[-1] == 'Use'

@pytest.mark.parametrize('stop', ['', ['a', '']])
def test_TX11_empty_stop_is_refused(stop):
    from minivllm.sampling import SamplingParams
    with pytest.raises(ValueError, match='stop must hold strings of at least one character'): SamplingParams(stop=stop)
    if stop: 
        with pytest.raises(ValueError, match='at least one character'): IncrementalDetokenizer(ZOO['llama'], [], stop=stop)

def test_TX13_no_stop_before_min_tokens():
    tok = ZOO['llama']
    a, b = (tok.backend.token_to_id(t) for t in 'ab')
    output = [a, b] + [a] * 9 + [b, a]
    detok, deltas = run(tok, output, [a], stop=['b'], min_tokens=10)
    assert detok.stopped == 'b' and detok.num_tokens == 12 and detok.text == 'ab' + 'a' * 9
    detok, _ = run(tok, output, [a], stop=['b'], min_tokens=1)
    assert detok.num_tokens == 2 and detok.text == 'a'
    detok, _ = run(tok, output, [a], stop=['b'], min_tokens=2)  # completed by token 2: not yet
    assert detok.num_tokens == 12

# --- tokenizer files and templates ---

def save(tok, folder, **config):
    tok.backend.save(str(folder/'tokenizer.json'))
    (folder/'tokenizer_config.json').write_text(json.dumps(config))
    return folder

@pytest.mark.parametrize('name', ['byte_level', 'llama', 'metaspace'])
def test_from_folder_equals_transformers(tmp_path, name):
    from transformers import AutoTokenizer
    ends = dict(bos_token='<s>', eos_token='</s>', unk_token='<unk>') if name != 'byte_level' else dict(eos_token='<|end|>', bos_token='<|end|>')
    for i, extra in enumerate([{}, {'add_bos_token': True}, {'add_bos_token': False, 'add_eos_token': True}]):
        folder = tmp_path/str(i)
        folder.mkdir()
        save(ZOO[name], folder, tokenizer_class='PreTrainedTokenizerFast', **ends, **extra)
        mine, ref = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
        for text in CORPUS + ['', 'a</s>b<|end|>']: assert mine.encode(text) == ref(text).input_ids
        for text in CORPUS: assert mine.encode(text, add_special_tokens=False) == ref(text, add_special_tokens=False).input_ids
        assert (mine.bos_token_id, mine.eos_token_id, mine.vocab_size) == (ref.bos_token_id, ref.eos_token_id, len(ref))
        assert mine.special_ids == set(ref.all_special_ids) | {i for i, t in ref.added_tokens_decoder.items() if t.special}
        for text in CORPUS: assert mine.decode(mine.encode(text)) == ref.decode(ref(text).input_ids, skip_special_tokens=True)

def test_truncation_in_the_file_is_not_applied(tmp_path):
    tok = byte_level()
    tok.backend.enable_truncation(3); tok.backend.enable_padding(length=8)
    save(tok, tmp_path)
    assert len(Tokenizer.from_folder(tmp_path).encode('one two three four')) > 8

def test_files_that_are_missing_or_broken(tmp_path):
    with pytest.raises(FileNotFoundError, match='no tokenizer in .*: it needs tokenizer.json'): Tokenizer.from_folder(tmp_path)
    save(ZOO['llama'], tmp_path)
    (tmp_path/'tokenizer_config.json').write_text('{"bos')
    with pytest.raises(ValueError, match='tokenizer_config.json is not valid JSON'): Tokenizer.from_folder(tmp_path)
    (tmp_path/'tokenizer_config.json').write_text('{}')
    whole = (tmp_path/'tokenizer.json').read_text()
    for broken in ('', '{}', '[1]', whole[:len(whole)//2]):
        (tmp_path/'tokenizer.json').write_text(broken)
        with pytest.raises(ValueError, match='cannot be read as a tokenizer') as e: Tokenizer.from_folder(tmp_path)
        assert '\n' not in str(e.value)

def test_old_files_are_converted_once(tmp_path, monkeypatch):
    from transformers import GPT2Tokenizer
    monkeypatch.setenv('MINIVLLM_HOME', str(tmp_path/'home'))
    old = tmp_path/'old'
    old.mkdir()
    byte_level(special=('<|endoftext|>',)).backend.model.save(str(old))
    (old/'tokenizer_config.json').write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    (old/'config.json').write_text('{"model_type": "gpt2"}')
    ref = GPT2Tokenizer.from_pretrained(old)
    tok = Tokenizer.from_folder(old)
    for text in CORPUS: assert tok.encode(text) == ref(text).input_ids
    made = [p for p in (tmp_path/'home').rglob('tokenizer.json')]
    stamp = made[0].stat().st_mtime_ns
    Tokenizer.from_folder(old)
    assert len(made) == 1 and made[0].stat().st_mtime_ns == stamp

CHATS = [[{'role': 'user', 'content': 'Hi'}], [{'role': 'system', 'content': 'Be <brief> & "kind"'}, {'role': 'user', 'content': '你好'}, {'role': 'assistant', 'content': 'ok'}, {'role': 'user', 'content': 'x'}]]
TEMPLATE = """{{ bos_token }}{% for message in messages %}
    {% if message.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}
{{ message.role }}: {% generation %}{{ message.content | trim }}{% endgeneration %}{{ eos_token }}
{% if loop.index == 9 %}{% break %}{% endif %}
{% endfor %}
{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}
{% if add_generation_prompt %}assistant:{% endif %}"""

@pytest.mark.parametrize('where', ['config', 'named list', 'file'])
def test_chat_template_equals_transformers(tmp_path, where):
    from transformers import AutoTokenizer
    template = {'config': TEMPLATE, 'named list': [{'name': 'default', 'template': TEMPLATE}, {'name': 'tool_use', 'template': '{{ bos_token }}x'}], 'file': None}[where]
    save(ZOO['llama'], tmp_path, bos_token='<s>', eos_token='</s>', **({'chat_template': template} if template else {}))
    if where == 'file': (tmp_path/'chat_template.jinja').write_text(TEMPLATE)
    mine, ref = Tokenizer.from_folder(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for chat in CHATS:
        for kw in ({}, {'add_generation_prompt': False}, {'tools': [{'type': 'function', 'function': {'name': 'é<f>'}}]}):
            ids = mine.apply_chat_template(chat, **kw)
            assert mine.render_chat(chat, **kw) == ref.apply_chat_template(chat, tokenize=False, **{'add_generation_prompt': True} | kw)
            assert ids.count(mine.bos_token_id) == 1 and ids[0] == mine.bos_token_id # not twice
    with pytest.raises(ValueError, match='refuses these messages: no tools here'): mine.apply_chat_template([{'role': 'tool', 'content': ''}])
    with pytest.raises(ValueError, match="messages must be a list"): mine.apply_chat_template([])
    with pytest.raises(ValueError, match='has no chat template: pass chat_template'): ZOO['llama'].apply_chat_template(CHATS[0])
    assert mine.decode(ZOO['llama'].apply_chat_template(CHATS[0], chat_template='{{ messages[0].content }}')).strip() == 'Hi'

def test_template_cannot_reach_out():
    evil = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(ValueError, match='refuses'): ZOO['llama'].apply_chat_template(CHATS[0], chat_template=evil)

def test_ids_beyond_the_vocabulary_have_no_text():
    for tok in ZOO.values(): assert tok.token_bytes(tok.vocab_size + 1) == b'' and tok.decode([tok.vocab_size + 1]) == ''

def test_an_id_without_text_does_not_end_the_beginning():
    for tok in (ZOO['metaspace'], ZOO['llama']):
        first = tok.backend.token_to_id('▁Paris')
        assert tok.decode([tok.vocab_size + 1, first]) == tok.backend.decode([tok.vocab_size + 1, first]) == 'Paris'
