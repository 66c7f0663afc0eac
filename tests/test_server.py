"The HTTP surface, by the official client, against a real server process on loopback."
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import httpx
import openai
import pytest

from minivllm import LLM, SamplingParams
from served import Served, slow_down

HI = [dict(role='user', content='the quick brown fox')]


@pytest.fixture(scope='module')
def server(tiny):
    with Served(tiny, '--dtype', 'float32', '--served-model-name', 'tiny', '--block-size', 4, '--num-blocks', 512) as s:
        yield s
        s.wait_idle()


@pytest.fixture(scope='module')
def client(server): return server.client()


@pytest.fixture(scope='module')
def llm(tiny): return LLM(str(tiny), dtype='float32', block_size=4, num_blocks=512)


def offline(llm, prompt, **kw): return llm.generate(prompt, SamplingParams(**dict(temperature=0, max_tokens=8, ignore_eos=True) | kw), use_tqdm=False)[0]
def ask(client, chat, **kw):
    kw = dict(model='tiny', temperature=0, max_tokens=8) | kw
    kw['extra_body'] = dict(ignore_eos=True) | kw.get('extra_body', {})
    return client.chat.completions.create(messages=HI, **kw) if chat else client.completions.create(**dict(prompt='the quick brown fox') | kw)
def events(response): return [json.loads(l[6:]) if l != 'data: [DONE]' else 'DONE' for l in response.text.split('\n\n') if l]


# --- every shape of an answer

@pytest.mark.parametrize('chat, n, logprobs', list(product((False, True), (1, 2), (False, True))))
def test_stream_and_whole_say_the_same(server, client, chat, n, logprobs):
    kw = dict(n=n, seed=3, temperature=1., extra_body=dict(return_token_ids=True))
    if logprobs: kw |= dict(logprobs=True, top_logprobs=2) if chat else dict(logprobs=2)
    whole = ask(client, chat, **kw)
    assert len(whole.choices) == n and whole.object == ('chat.completion' if chat else 'text_completion') and whole.model == 'tiny'
    assert whole.id.startswith('chatcmpl-' if chat else 'cmpl-') and abs(whole.created - time.time()) < 100
    assert [c.index for c in whole.choices] == list(range(n)) and all(c.finish_reason in ('stop', 'length') for c in whole.choices)
    for usage in None, {}, dict(include_usage=True):
        chunks = list(ask(client, chat, stream=True, **kw, **({} if usage is None else dict(stream_options=usage))))
        assert len({(c.id, c.created) for c in chunks}) == 1 and {c.object for c in chunks} == {'chat.completion.chunk' if chat else 'text_completion'}
        with_usage = bool(usage)
        assert all(('usage' in c.model_fields_set) == with_usage for c in chunks)
        if with_usage:
            assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage.model_copy(update=dict(prompt_tokens_details=chunks[-1].usage.prompt_tokens_details))
            assert all(c.usage is None for c in chunks[:-1])
            chunks.pop()
        for i, c in enumerate(whole.choices):
            mine = [x.choices[0] for x in chunks if x.choices[0].index == i]
            assert all(len(x.choices) == 1 for x in chunks) and [x.finish_reason for x in mine] == [None] * (len(mine) - 1) + [c.finish_reason]
            assert sum((x.token_ids or [] for x in mine if hasattr(x, 'token_ids')), []) == c.token_ids
            if chat:
                assert (mine[0].delta.role, mine[0].delta.content) == ('assistant', '') and mine[-1].delta.model_fields_set == set()
                assert ''.join(x.delta.content or '' for x in mine) == c.message.content and c.message.role == 'assistant'
                if logprobs: assert [e for x in mine if x.logprobs for e in x.logprobs.content] == c.logprobs.content and all(len(e.top_logprobs) == 2 for e in c.logprobs.content)
                else: assert c.logprobs is None
            else:
                assert ''.join(x.text for x in mine) == c.text
                if logprobs:
                    for name in 'tokens', 'token_logprobs', 'top_logprobs', 'text_offset': assert sum((getattr(x.logprobs, name) for x in mine), []) == getattr(c.logprobs, name)
                else: assert c.logprobs is None
    server.wait_idle()


def test_the_server_says_what_the_engine_says(client, llm):
    out = offline(llm, 'the quick brown fox')
    assert ask(client, False).choices[0].text == out.outputs[0].text
    ids = llm.tokenizer.apply_chat_template(HI)
    assert ask(client, True).choices[0].message.content == offline(llm, ids).outputs[0].text
    u = ask(client, True).usage
    assert (u.prompt_tokens, u.completion_tokens, u.total_tokens) == (len(ids), 8, len(ids) + 8) and u.prompt_tokens_details.cached_tokens == (len(ids) - 1) // 4 * 4


def test_prompts_as_ids_and_in_batches(client, llm):
    ids = llm.tokenizer.encode('the quick brown fox')
    want = offline(llm, ids).outputs[0].text
    other = offline(llm, 'the lazy dog').outputs[0].text
    assert ask(client, False, prompt=ids).choices[0].text == want
    assert [c.text for c in ask(client, False, prompt=['the lazy dog', 'the quick brown fox']).choices] == [other, want]
    batch = ask(client, False, prompt=[ids, llm.tokenizer.encode('the lazy dog')], n=2, seed=1, temperature=1.)
    assert [c.index for c in batch.choices] == [0, 1, 2, 3] and batch.usage.prompt_tokens == len(ids) + len(llm.tokenizer.encode('the lazy dog')) and batch.usage.completion_tokens <= 32
    alone = ask(client, False, prompt=ids, n=2, seed=1, temperature=1.)
    assert [c.text for c in batch.choices[:2]] == [c.text for c in alone.choices]


def test_stream_of_a_batch(client, llm):
    texts = ['', '']
    for c in ask(client, False, prompt=['the lazy dog', 'the quick brown fox'], stream=True): texts[c.choices[0].index] += c.choices[0].text
    assert texts == [offline(llm, p).outputs[0].text for p in ('the lazy dog', 'the quick brown fox')]


@pytest.mark.parametrize('prompt', ['the quick brown fox', 'Grüße, 🙂🙂 ok', [70, 71, 259, 72]])
@pytest.mark.parametrize('logprobs', [None, 0, 3])
def test_echo(client, llm, prompt, logprobs):
    plain = ask(client, False, prompt=prompt, logprobs=logprobs).choices[0]
    c = ask(client, False, prompt=prompt, echo=True, logprobs=logprobs).choices[0]
    shown = prompt if isinstance(prompt, str) else llm.tokenizer.decode(prompt)
    assert c.text == shown + plain.text
    if logprobs is None: return
    n = len(llm.tokenizer.encode(prompt)) if isinstance(prompt, str) else len(prompt)
    lp = c.logprobs
    assert len(lp.tokens) == n + 8 == len(lp.token_logprobs) == len(lp.top_logprobs) == len(lp.text_offset)
    assert lp.token_logprobs[0] is None and lp.top_logprobs[0] is None and all(x <= 0 for x in lp.token_logprobs[1:])
    assert lp.text_offset == sorted(lp.text_offset) and lp.text_offset[0] == 0 and lp.text_offset[n:] == [o + len(shown) for o in plain.logprobs.text_offset]
    for token, offset in zip(lp.tokens[:n], lp.text_offset):
        if not token.startswith('bytes:'): assert c.text[offset:].startswith(token)


def test_SV9_echo_and_no_tokens_scores_the_prompt(client):
    full = ask(client, False, echo=True, logprobs=2).choices[0].logprobs
    r = ask(client, False, echo=True, logprobs=2, max_tokens=0)
    c = r.choices[0]
    assert c.text == 'the quick brown fox' and r.usage.completion_tokens == 0 and c.finish_reason == 'length'
    n = r.usage.prompt_tokens
    assert c.logprobs.tokens == full.tokens[:n] and c.logprobs.token_logprobs == full.token_logprobs[:n] and c.logprobs.text_offset == full.text_offset[:n]
    assert ask(client, False, max_tokens=0).choices[0].text == ''
    streamed = list(ask(client, False, echo=True, logprobs=2, max_tokens=0, stream=True))
    assert [x.choices[0].text for x in streamed] == [c.text] and streamed[0].choices[0].logprobs == c.logprobs


def test_PC9_echo_of_a_cached_prompt(server, client):
    prompt = 'the quick brown fox jumps over the lazy dog ' * 4
    first, again = (ask(client, False, prompt=prompt, echo=True, logprobs=1, max_tokens=3) for _ in range(2))
    assert first.choices == again.choices
    for _ in range(2): assert ask(client, False, prompt=prompt, echo=True, max_tokens=3).choices[0].text == first.choices[0].text
    assert ask(client, False, max_tokens=1).choices[0].finish_reason == 'length'


def test_SV4_usage_in_a_stream(server):
    body = dict(prompt='the cat', max_tokens=3, temperature=0, stream=True, ignore_eos=True)
    plain, empty, true, running = (events(server.post('/v1/completions', body | dict(stream_options=o) if o is not None else body)) for o in (None, {}, dict(include_usage=True), dict(include_usage=True, continuous_usage_stats=True)))
    assert plain[-1] == empty[-1] == true[-1] == 'DONE'
    assert not any('usage' in e for e in plain[:-1] + empty[:-1])
    assert all(e['usage'] is None and e['choices'] for e in true[:-2]) and true[-2]['choices'] == [] and true[-2]['usage']['completion_tokens'] == 3
    counts = [e['usage']['completion_tokens'] for e in running[:-1]]
    assert counts == sorted(counts) and counts[-2:] == [3, 3]
    r = server.post('/v1/completions', dict(prompt='the cat', stream_options=dict(include_usage=True)))
    assert r.status_code == 400 and r.json()['error']['param'] == 'stream_options'


def test_SV5_logprobs_without_top_logprobs(client):
    c = ask(client, True, logprobs=True).choices[0]
    assert len(c.logprobs.content) == 8 and all(e.top_logprobs == [] and e.logprob <= 0 for e in c.logprobs.content)
    assert b''.join(bytes(e.bytes) for e in c.logprobs.content).decode(errors='replace') == c.message.content
    with pytest.raises(openai.BadRequestError, match='top_logprobs'): ask(client, True, top_logprobs=2)


@pytest.mark.parametrize('prompt', ['the quick brown fox', 'Grüße, 🙂🙂 ok'])
def test_SV7_offsets_of_a_stream_with_echo(client, prompt):
    whole = ask(client, False, prompt=prompt, echo=True, logprobs=1).choices[0]
    parts = [c.choices[0] for c in ask(client, False, prompt=prompt, echo=True, logprobs=1, stream=True)]
    assert sum((p.logprobs.text_offset for p in parts), []) == whole.logprobs.text_offset and ''.join(p.text for p in parts) == whole.text


def test_stop_in_the_middle_of_a_token(client, llm):
    text = offline(llm, 'the quick brown fox', max_tokens=30).outputs[0].text
    stop = next(text[i:i+2] for i in range(6, len(text) - 2) if text[i:i+2].isprintable() and '�' not in text[i:i+2] and text.find(text[i:i+2]) == i)
    c = ask(client, False, max_tokens=30, stop=stop).choices[0]
    assert c.text == text[:text.index(stop)] and (c.finish_reason, c.stop_reason) == ('stop', stop)
    parts = [x.choices[0] for x in ask(client, False, max_tokens=30, stop=[stop], stream=True)]
    assert ''.join(p.text for p in parts) == c.text and parts[-1].finish_reason == 'stop'


def test_seed_repeats(client):
    once = lambda seed: ask(client, False, temperature=1., seed=seed, max_tokens=20).choices[0].text
    assert once(7) == once(7) != once(8)
    a, b = ask(client, True, temperature=1., seed=7), ask(client, True, temperature=1., seed=7)
    assert a.choices == b.choices and a.system_fingerprint == b.system_fingerprint


def test_logit_bias_forces_and_bans(client):
    forced = ask(client, False, max_tokens=3, logit_bias={'70': 100}, extra_body=dict(return_token_ids=True)).choices[0]
    assert set(forced.token_ids) == {70}
    first = ask(client, False, max_tokens=1, extra_body=dict(return_token_ids=True)).choices[0].token_ids[0]
    banned = ask(client, False, max_tokens=1, logit_bias={str(first): -100}, extra_body=dict(return_token_ids=True)).choices[0]
    assert banned.token_ids != [first]


def test_max_completion_tokens_wins_and_a_chat_has_no_other_limit(client, server):
    assert ask(client, True, max_completion_tokens=3).usage.completion_tokens == 3
    body = dict(messages=HI, temperature=0, ignore_eos=True)
    u = server.post('/v1/chat/completions', body).json()['usage']
    assert u['total_tokens'] == 512
    assert server.post('/v1/completions', dict(prompt='the cat', temperature=0, ignore_eos=True)).json()['usage']['completion_tokens'] == 16


def test_vllm_extras(server, llm):
    post = lambda **kw: server.post('/v1/completions', dict(prompt='the quick brown fox', max_tokens=6, temperature=0) | kw)
    out = post(prompt_logprobs=1, return_token_ids=True).json()['choices'][0]
    assert len(out['prompt_logprobs']) == len(out['prompt_token_ids']) and out['prompt_logprobs'][0] is None and len(out['token_ids']) == 6
    assert post(request_id='mine').json()['id'] == 'cmpl-mine' and post(request_id='mine').status_code == 200
    assert post(logprobs=1, return_tokens_as_token_ids=True).json()['choices'][0]['logprobs']['tokens'][0].startswith('token_id:')
    assert post(truncate_prompt_tokens=2, echo=True).json()['usage']['prompt_tokens'] == 2
    assert post(allowed_token_ids=[70]).json()['choices'][0]['text'] == llm.tokenizer.decode([70] * 6)
    assert post(skip_reading_prefix_cache=True).json()['usage']['prompt_tokens_details']['cached_tokens'] == 0
    assert post(cache_salt='a').json()['usage']['prompt_tokens_details']['cached_tokens'] == 0
    assert post(cache_salt='a').json()['usage']['prompt_tokens_details']['cached_tokens'] > 0
    assert post(user='somebody', priority=-1, top_k=-1, min_p=0.).status_code == 200


def test_answers_of_a_given_form(server, client):
    schema = dict(type='object', properties=dict(a=dict(type='integer', minimum=0, maximum=9), b=dict(enum=['x', 'y'])), required=['a', 'b'], additionalProperties=False)
    form = dict(type='json_schema', json_schema=dict(name='pair', schema=schema, strict=True))
    for stream in False, True:
        r = client.chat.completions.create(model='tiny', messages=HI, max_tokens=200, response_format=form, stream=stream, seed=1)
        text = ''.join(c.choices[0].delta.content or '' for c in r) if stream else r.choices[0].message.content
        assert set(json.loads(text)) == {'a', 'b'}, text
    c = server.post('/v1/completions', dict(prompt='the cat', max_tokens=50, n=2, structured_outputs=dict(choice=['yes', 'no']))).json()['choices']
    assert all(x['text'] in ('yes', 'no') and x['finish_reason'] == 'stop' for x in c)
    assert server.post('/v1/completions', dict(prompt='the cat', max_tokens=50, structured_outputs=dict(regex='[0-9]{4}'))).json()['choices'][0]['text'].isdigit()
    assert ask(client, True, response_format=dict(type='text')).usage.completion_tokens == 8


def test_parts_and_messages_sent_back(client, llm):
    parts = [dict(role='user', content=[dict(type='text', text='the quick'), dict(type='text', text='brown fox')])]
    first = client.chat.completions.create(model='tiny', messages=parts, max_tokens=4, temperature=0)
    assert first.usage.prompt_tokens == len(llm.tokenizer.apply_chat_template([dict(role='user', content='the quick\nbrown fox')]))
    history = [*HI, first.choices[0].message.model_dump(), dict(role='user', content='and', name='me')]
    assert client.chat.completions.create(model='tiny', messages=history, max_tokens=4).usage.completion_tokens == 4
    with pytest.raises(openai.BadRequestError, match='messages'): client.chat.completions.create(model='tiny', messages=[dict(role='user', content=[dict(type='image_url', image_url=dict(url='x'))])])


# --- errors

BAD = [  # endpoint, body, status, param, code
    ('completions', {}, 400, 'prompt', None), ('completions', dict(prompt=dict(a=1)), 400, 'prompt', None), ('completions', dict(prompt=''), 400, 'prompt', None),
    ('completions', dict(prompt=[]), 400, 'prompt', None), ('completions', dict(prompt=[[]]), 400, 'prompt', None), ('completions', dict(prompt=['a', '']), 400, 'prompt', None),
    ('completions', dict(prompt=[1, 'a']), 400, 'prompt', None), ('completions', dict(prompt=[10**6]), 400, 'prompt', None), ('completions', dict(prompt=[-1]), 400, 'prompt', None), ('completions', dict(prompt=[True]), 400, 'prompt', None),
    ('completions', dict(prompt='a' * 3000), 400, 'prompt', 'context_length_exceeded'), ('completions', dict(prompt=[5] * 512), 400, 'prompt', 'context_length_exceeded'),
    ('completions', dict(prompt='a', model='gpt-5'), 404, 'model', 'model_not_found'), ('completions', dict(prompt='a', model=3), 400, 'model', None),
    ('completions', dict(prompt='a', temperature=-1), 400, 'temperature', None), ('completions', dict(prompt='a', temperature='1'), 400, 'temperature', None), ('completions', dict(prompt='a', top_p=0), 400, 'top_p', None),
    ('completions', dict(prompt='a', n=0), 400, 'n', None), ('completions', dict(prompt='a', n=129), 400, 'n', None), ('completions', dict(prompt='a', n=True), 400, 'n', None), ('completions', dict(prompt='a', max_tokens=-1), 400, 'max_tokens', None),
    ('completions', dict(prompt='a', max_tokens=0, n=2), 400, 'n', None), ('completions', dict(prompt='a', logprobs=21), 400, 'logprobs', None), ('completions', dict(prompt='a', logprobs=True), 400, 'logprobs', None),
    ('completions', dict(prompt='a', stop=['']), 400, 'stop', None), ('completions', dict(prompt='a', stop=['a'] * 65), 400, 'stop', None), ('completions', dict(prompt='a', seed=2**64), 400, 'seed', None),
    ('completions', dict(prompt='a', logit_bias={'x': 1}), 400, 'logit_bias', None), ('completions', dict(prompt='a', logit_bias={'1': 101}), 400, 'logit_bias', None), ('completions', dict(prompt='a', logit_bias={'99999': 1}), 400, 'logit_bias', None),
    ('completions', dict(prompt='a', best_of=2), 400, 'best_of', None), ('completions', dict(prompt='a', suffix='x'), 400, 'suffix', None), ('completions', dict(prompt='a', tempreature=1), 400, 'tempreature', None),
    ('completions', dict(prompt='a', stream_options=dict(include_usage=True)), 400, 'stream_options', None), ('completions', dict(prompt='a', stream=True, stream_options=dict(x=1)), 400, 'stream_options', None),
    ('completions', dict(prompt='a', stream=True, prompt_logprobs=1), 400, 'prompt_logprobs', None), ('completions', dict(prompt='a', response_format=dict(type='xml')), 400, 'response_format', None), ('completions', dict(prompt='a', response_format=dict(type='json_schema')), 400, 'response_format', None), ('completions', dict(prompt='a', response_format=dict(type='json_schema', json_schema=dict(name='x', schema=dict(type='nonsense')))), 400, 'response_format', None), ('completions', dict(prompt='a', structured_outputs=dict(regex='(')), 400, 'structured_outputs', None), ('completions', dict(prompt='a', structured_outputs=dict(regexp='a')), 400, 'structured_outputs', None), ('completions', dict(prompt='a', structured_outputs={}), 400, 'structured_outputs', None),
    ('completions', dict(prompt='a', stream=True, temperature=-1), 400, 'temperature', None), ('completions', dict(prompt='\ud800'), 400, 'prompt', None), ('completions', dict(prompt='a', priority=2**80), 400, 'priority', None),
    ('completions', dict(prompt='a', allowed_token_ids=[]), 400, 'allowed_token_ids', None), ('completions', dict(prompt='a', bad_words=['']), 400, 'bad_words', None), ('completions', dict(prompt=['a'] * 2000), 400, 'n', None),
    ('chat/completions', {}, 400, 'messages', None), ('chat/completions', dict(messages={}), 400, 'messages', None), ('chat/completions', dict(messages=[]), 400, 'messages', None), ('chat/completions', dict(messages=[dict(role='x', content='a')]), 400, 'messages', None),
    ('chat/completions', dict(messages=[dict(role='user')]), 400, 'messages', None), ('chat/completions', dict(messages=HI, max_tokens=0), 400, 'max_tokens', None), ('chat/completions', dict(messages=HI, max_completion_tokens=0), 400, 'max_completion_tokens', None),
    ('chat/completions', dict(messages=HI, top_logprobs=3), 400, 'top_logprobs', None), ('chat/completions', dict(messages=HI, logprobs=True, top_logprobs=21), 400, 'top_logprobs', None), ('chat/completions', dict(messages=HI, tools=[dict(type='function')]), 400, 'tools', None),
    ('chat/completions', dict(messages=[dict(role='user', content='a' * 3000)]), 400, 'messages', 'context_length_exceeded'), ('chat/completions', dict(messages=HI, model='x'), 404, 'model', 'model_not_found')]


@pytest.mark.parametrize('where, body, status, param, code', BAD, ids=lambda x: str(x)[:40] if isinstance(x, dict) else '')
def test_SV1_SV2_errors_have_one_envelope_and_name_the_field(server, where, body, status, param, code):
    r = httpx.post(f'{server.url}/v1/{where}', content=json.dumps(body), headers={'content-type': 'application/json'}, timeout=30)
    assert r.status_code == status and set(r.json()) == {'error'} and r.headers['content-type'] == 'application/json', r.text
    e = r.json()['error']
    assert set(e) == {'message', 'type', 'param', 'code'} and isinstance(e['message'], str) and e['message'] and isinstance(e['type'], str)
    assert e['param'] == param and e['code'] == code, e


def test_errors_of_http_itself(server):
    cases = [(server.get('/nope'), 404), (server.get('/v1/completions'), 405), (httpx.post(server.url + '/v1/completions', content=b'{"prompt": ', headers={'content-type': 'application/json'}), 400),
             (httpx.post(server.url + '/v1/completions', content=b'[1]', headers={'content-type': 'application/json'}), 400), (httpx.post(server.url + '/v1/completions', content=b'[' * 100_000, headers={'content-type': 'application/json'}), 400),
             (httpx.post(server.url + '/v1/completions', content=b'{"prompt": "a", "temperature": NaN}', headers={'content-type': 'application/json'}), 400), (httpx.post(server.url + '/v1/completions', data=dict(prompt='a')), 400)]
    for r, status in cases: assert r.status_code == status and set(r.json()['error']) == {'message', 'type', 'param', 'code'}, r.text


def test_null_means_not_given(server):
    body = dict(prompt='the cat', max_tokens=2) | {k: None for k in ('suffix', 'best_of', 'temperature', 'stop', 'logprobs', 'n', 'seed', 'logit_bias', 'stream_options', 'user', 'response_format', 'tools')}
    assert server.post('/v1/completions', body).status_code == 200
    assert server.post('/v1/completions', body | dict(nonsense=None)).json()['error']['param'] == 'nonsense'


def test_official_client_sees_the_right_exceptions(client):
    with pytest.raises(openai.NotFoundError) as e: ask(client, False, model='nope')
    assert e.value.code == 'model_not_found' and e.value.param == 'model'
    with pytest.raises(openai.BadRequestError) as e: ask(client, True, temperature=-1)
    assert e.value.param == 'temperature' and e.value.request_id


# --- the small routes

def test_models(client, server):
    [m] = client.models.list().data
    assert (m.id, m.object, m.owned_by, m.max_model_len) == ('tiny', 'model', 'minivllm', 512) and client.models.retrieve('tiny') == m
    with pytest.raises(openai.NotFoundError): client.models.retrieve('other')


def test_tokenize_and_back(server, llm):
    r = server.post('/tokenize', dict(prompt='the quick', return_token_strs=True)).json()
    assert r['tokens'] == llm.tokenizer.encode('the quick') and r['count'] == len(r['tokens']) == len(r['token_strs']) and r['max_model_len'] == 512
    assert server.post('/detokenize', dict(tokens=r['tokens'])).json() == dict(prompt='the quick')
    assert server.post('/tokenize', dict(messages=HI)).json()['tokens'] == llm.tokenizer.apply_chat_template(HI)
    for path, body, param in (('/tokenize', {}, 'prompt'), ('/tokenize', dict(prompt='a', messages=HI), 'prompt'), ('/detokenize', dict(tokens=[-1]), 'tokens'), ('/detokenize', dict(tokens='a'), 'tokens'), ('/tokenize', dict(prompt='a' * 10**5), 'prompt')):
        r = server.post(path, body)
        assert r.status_code == 400 and r.json()['error']['param'] == param


def test_health_version_and_request_ids(server):
    from minivllm import __version__
    for path in '/health', '/ping':
        r = server.get(path)
        assert r.status_code == 200 and r.content == b''
    assert server.get('/version').json() == dict(version=__version__)
    assert server.get('/health', headers={'x-request-id': 'abc-1'}).headers['x-request-id'] == 'abc-1'
    assert re.fullmatch('[0-9a-f]{32}', server.get('/health', headers={'x-request-id': 'a b\tc'}).headers['x-request-id'])
    assert server.get('/nope').headers['x-request-id']


def test_log_has_ids_and_no_prompts(server, client):
    r = client.completions.create(model='tiny', prompt='secret cat', max_tokens=2)
    time.sleep(.2)
    assert r.id in server.log and 'secret' not in server.log


COUNTS = 'vllm:prompt_tokens_total', 'vllm:generation_tokens_total', 'vllm:request_success_total', 'vllm:time_to_first_token_seconds_count', 'vllm:inter_token_latency_seconds_count', 'vllm:prefix_cache_queries_total', 'vllm:prefix_cache_hits_total'


def test_metrics_equal_the_sums_of_usage(server, client):
    server.wait_idle()
    before = [server.metric(n) for n in COUNTS]
    usages = [ask(client, False, n=2, seed=1, temperature=1.).usage, ask(client, True).usage, ask(client, False, prompt=['the cat', 'the dog'], max_tokens=5).usage, ask(client, False, max_tokens=0).usage]
    usages += [c.usage for c in ask(client, True, stream=True, stream_options=dict(include_usage=True)) if c.usage]
    prompt, generated, ends, ttft, itl, queries, hits = (server.metric(n) - b for n, b in zip(COUNTS, before))
    assert prompt == queries == sum(u.prompt_tokens for u in usages) and generated == sum(u.completion_tokens for u in usages)
    assert hits == sum(u.prompt_tokens_details.cached_tokens for u in usages)
    assert ends == 7 and ttft == 5 and itl == generated - 6
    assert server.metric('http_requests_total', handler='/v1/completions', status='200') > 0 and server.metric('vllm:cache_config_info', block_size='4') == 1
    for name in ('e2e_request_latency', 'request_queue_time', 'request_prefill_time', 'request_decode_time', 'request_inference_time'): assert server.metric(f'vllm:{name}_seconds_count') > 0


# --- clients that leave

def test_SV13_a_client_that_leaves_frees_its_blocks(server, client):
    server.wait_idle()
    aborted = lambda: server.metric('vllm:request_success_total', finished_reason='abort')
    for stream in True, False:
        before, made = aborted(), server.metric('vllm:generation_tokens_total')
        body = json.dumps(dict(prompt='the cat', max_tokens=500, ignore_eos=True, stream=stream, n=3)).encode()
        with socket.create_connection(('127.0.0.1', server.port)) as s:
            s.sendall(b'POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n' % len(body) + body)
            if stream: assert b'200 OK' in s.recv(100)
            else:
                while not server.metric('vllm:num_requests_running'): time.sleep(.005)
        server.wait_idle(10)
        assert aborted() == before + 3 and server.metric('vllm:generation_tokens_total') - made < 1400
    with client.completions.with_streaming_response.create(model='tiny', prompt='the cat', max_tokens=500, stream=True) as r: next(r.iter_bytes())
    server.wait_idle(10)
    assert ask(client, False).choices[0].finish_reason == 'length'


def test_many_at_once_get_what_they_get_alone(server, client, llm):
    prompts = [f'the {w} {i}' for i in range(8) for w in ('cat', 'dog', 'fox')]
    def one(p): return ''.join(c.choices[0].text for c in client.completions.create(model='tiny', prompt=p, max_tokens=12, temperature=0, stream=True))
    with ThreadPoolExecutor(12) as pool: got = list(pool.map(one, prompts))
    assert got == [offline(llm, p, max_tokens=12, ignore_eos=False).outputs[0].text for p in prompts]


# --- a server with a key, small limits, little patience

@pytest.fixture(scope='module')
def strict(tiny):
    with Served(tiny, '--dtype', 'float32', '--max-body-bytes', 100_000, '--client-timeout', 1, '--max-queue', 2, '--max-num-seqs', 1, '--cors-origins', 'http://page.example', '--log-prompts',
                env=dict(MINIVLLM_API_KEY='s3cret', MINIVLLM_SERVED_MODEL_NAME='tiny')) as s: yield s


def test_the_key_guards_what_costs(strict):
    for path in '/v1/models', '/v1/models/tiny': assert strict.get(path).status_code == 401
    for path in '/v1/completions', '/v1/chat/completions', '/tokenize', '/detokenize':
        r = strict.post(path, dict(prompt='a'))
        assert r.status_code == 401 and r.json()['error']['code'] == 'invalid_api_key'
        assert strict.post(path, {}, headers=dict(authorization='Bearer wrong')).status_code == strict.post(path, {}, headers=dict(authorization='s3cret')).status_code == 401
    for path in '/health', '/version', '/metrics': assert strict.get(path).status_code == 200
    with pytest.raises(openai.AuthenticationError): strict.client().models.list()
    client = strict.client(api_key='s3cret')
    assert client.models.list().data[0].id == 'tiny' and ask(client, False, prompt='visible cat').usage.completion_tokens == 8
    time.sleep(.2)
    assert 'visible cat' in strict.log and 's3cret' not in strict.log
    assert strict.get('/v1/models', headers=dict(authorization='Bearer ' + 'x' * 10_000)).status_code == 401


def test_cors(strict):
    r = httpx.options(strict.url + '/v1/completions', headers={'origin': 'http://page.example', 'access-control-request-method': 'POST', 'access-control-request-headers': 'authorization'})
    assert r.status_code == 200 and r.headers['access-control-allow-origin'] == 'http://page.example'
    assert 'access-control-allow-origin' not in httpx.options(strict.url + '/v1/completions', headers={'origin': 'http://evil.example', 'access-control-request-method': 'POST'}).headers
    assert strict.get('/v1/models', headers={'origin': 'http://page.example'}).headers['access-control-allow-origin'] == 'http://page.example'      # also on a 401


def test_oversized_bodies_are_refused_in_bounded_time_and_memory(strict):
    auth = dict(authorization='Bearer s3cret')
    before, start = strict.memory(), time.monotonic()
    for _ in range(2):
        r = strict.post('/v1/completions', dict(prompt='a' * 10_000_000), headers=auth)
        assert r.status_code == 413 and r.json()['error']['code'] == 'body_too_large'
        def pieces():
            for _ in range(200): yield b'x' * 100_000
        r = httpx.post(strict.url + '/v1/completions', content=pieces(), headers=auth)                       # chunked: no length given
        assert r.status_code == 413
        assert strict.post('/v1/completions', dict(prompt='a' * 10_000_000)).status_code == 401              # not even read
    assert time.monotonic() - start < 20 and strict.memory() - before < 30e6
    assert strict.get('/health').status_code == 200


def test_ten_megabytes_of_prompt_within_the_limit_are_refused_quickly(server):
    start = time.monotonic()
    r = server.post('/v1/completions', dict(prompt='the cat ' * 900_000))
    assert r.status_code == 400 and r.json()['error']['code'] == 'context_length_exceeded' and time.monotonic() - start < 10
    r = server.post('/v1/chat/completions', dict(messages=[dict(role='user', content='the cat ' * 900_000)]))
    assert r.status_code == 400 and r.json()['error']['code'] == 'context_length_exceeded'
    assert server.post('/v1/completions', dict(prompt='the cat ' * 1_400_000)).status_code == 413


@pytest.mark.parametrize('begin', [b'', b'POST /v1/comp', b'POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer s3cret\r\ncontent-type: application/json\r\ncontent-length: 1000\r\n\r\n{"pro'])
def test_a_slow_loris_is_cut_off(strict, begin):
    with socket.create_connection(('127.0.0.1', strict.port)) as s:
        start = time.monotonic()
        s.sendall(begin)
        s.settimeout(.1)
        while time.monotonic() - start < 10:
            try:
                if begin: s.sendall(b'x')
                if s.recv(1) == b'': break
            except TimeoutError: pass
            except ConnectionError: break
        assert time.monotonic() - start < 5
    assert strict.get('/health').status_code == 200


def test_a_client_that_never_reads_is_cut_off(tiny):
    "Ten megabytes of answer, more than the kernel's buffers hold, and nobody who reads."
    with Served(tiny, '--dtype', 'float32', '--client-timeout', 1) as s:
        body = json.dumps(dict(prompt=['the cat'] * 8, n=8, max_tokens=400, ignore_eos=True, stream=True, logprobs=20)).encode()
        with socket.socket() as c:
            c.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            c.connect(('127.0.0.1', s.port))
            c.sendall(b'POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n' % len(body) + body)
            end = time.monotonic() + 60
            while not s.metric('http_requests_total', handler='/v1/completions', status='499'):
                assert time.monotonic() < end
                time.sleep(.1)
        s.wait_idle()


def test_a_full_queue_is_429(strict):
    auth = dict(authorization='Bearer s3cret')
    long = dict(prompt='the cat', max_tokens=400, ignore_eos=True)
    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(lambda i: strict.post('/v1/completions', long, headers=auth), range(8)))
    codes = sorted(r.status_code for r in got)
    assert set(codes) == {200, 429} and codes.count(200) >= 3
    full = next(r for r in got if r.status_code == 429).json()['error']
    assert full['code'] == 'queue_full' and full['type'] == 'rate_limit_error'
    strict.wait_idle()
    with pytest.raises(openai.BadRequestError): ask(strict.client(api_key='s3cret'), False, n=3)


# --- base models, BOS

def test_SV11_no_chat_template(tmp_path):
    from tiny import tiny_llama
    with Served(tiny_llama(tmp_path, chat_template=None), '--dtype', 'float32', '--served-model-name', 'tiny') as s:
        r = s.post('/v1/chat/completions', dict(messages=HI))
        assert r.status_code == 400 and 'chat_template' in r.json()['error']['message']
        assert s.post('/v1/completions', dict(prompt='the cat', max_tokens=3)).json()['usage']['completion_tokens'] == 3
        assert 'Traceback' not in s.log


def test_SV12_one_BOS(tmp_path):
    from tiny import tiny_llama
    folder = tiny_llama(tmp_path, tokenizer='byte_fallback', chat_template="{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}")
    llm = LLM(str(folder), dtype='float32', num_blocks=64)
    [offline] = llm.chat([dict(role='user', content='the cat')], SamplingParams(temperature=0, max_tokens=5), use_tqdm=False)
    with Served(folder, '--dtype', 'float32') as s:
        c = s.post('/v1/chat/completions', dict(messages=[dict(role='user', content='the cat')], temperature=0, max_tokens=5, return_token_ids=True)).json()
        done = s.post('/v1/completions', dict(prompt='the cat', max_tokens=0, return_token_ids=True)).json()['choices'][0]
        bare = s.post('/v1/completions', dict(prompt='the cat', max_tokens=0, return_token_ids=True, add_special_tokens=False)).json()['choices'][0]
    bos = llm.tokenizer.bos_token_id
    assert c['prompt_token_ids'] == offline.prompt_token_ids and c['prompt_token_ids'].count(bos) == 1 == done['prompt_token_ids'].count(bos)
    assert c['choices'][0]['message']['content'] == offline.outputs[0].text and bos not in bare['prompt_token_ids']


# --- an engine that breaks, a server that is stopped

BREAKABLE = """
import os, pathlib
from minivllm.model_runner import ModelRunner
whole = ModelRunner.run_decode
def run_decode(self, seqs):
    if os.path.exists(os.environ['BREAK']): raise MemoryError('broken by the test')
    return whole(self, seqs)
ModelRunner.run_decode = run_decode
"""


def test_a_dead_engine_is_503_and_its_streams_get_an_error(tiny, tmp_path):
    with Served(tiny, '--dtype', 'float32', env=dict(BREAK=str(tmp_path/'now')), patch=BREAKABLE) as s:
        client = s.client()
        model = client.models.list().data[0].id
        stream = client.chat.completions.create(model=model, messages=HI, stream=True, max_tokens=400, extra_body=dict(ignore_eos=True))
        next(stream)
        (tmp_path/'now').touch()
        with pytest.raises(openai.APIError, match='broken by the test'):
            for c in stream: pass
        assert s.get('/health').status_code == 503 and s.get('/health').json()['error']['code'] == 'engine_dead'
        for stream in True, False:
            with pytest.raises(openai.InternalServerError) as e: client.completions.create(model=model, prompt='a', stream=stream)
            assert e.value.status_code == 503


def consume(server, n, stream=True):
    "Ask for an answer of `n` tokens; returns what came and how it ended."
    text, error = '', None
    try:
        for c in server.client(timeout=30).completions.create(model=server.model, prompt='the cat', max_tokens=n, stream=True, extra_body=dict(ignore_eos=True)): text += c.choices[0].text
    except (openai.APIError, httpx.HTTPError) as e: error = e
    return text, error


def busy(server, n, clients=6):
    server.model = server.client().models.list().data[0].id
    pool = ThreadPoolExecutor(clients)
    jobs = [pool.submit(consume, server, n) for _ in range(clients)]
    while server.metric('vllm:num_requests_running') < clients: time.sleep(.02)
    return jobs


def test_SIGTERM_lets_running_answers_finish(tiny):
    with Served(tiny, '--dtype', 'float32', patch=slow_down(.02)) as s:
        jobs = busy(s, 60)
        s.process.terminate()
        time.sleep(.5)
        with pytest.raises(httpx.ConnectError): s.get('/health')
        assert all(error is None and text for text, error in (j.result(30) for j in jobs))
        assert s.process.wait(20) == 0
    assert 'Traceback' not in s.log and 'stopped' in s.log


def test_SIGTERM_gives_up_after_the_grace_period(tiny):
    with Served(tiny, '--dtype', 'float32', '--grace-period', '1', patch=slow_down(.05)) as s:
        jobs, start = busy(s, 400), time.monotonic()
        s.process.terminate()
        for text, error in (j.result(30) for j in jobs): assert text and isinstance(error, openai.APIError) and 'shutting down' in str(error)
        assert s.process.wait(20) == 0 and time.monotonic() - start < 12
    assert 'Traceback' not in s.log


def test_second_SIGINT_ends_at_once(tiny):
    with Served(tiny, '--dtype', 'float32', patch=slow_down(.05)) as s:
        jobs, start = busy(s, 400), time.monotonic()
        for _ in range(2):
            s.process.send_signal(signal.SIGINT)
            time.sleep(.3)
        assert all(j.result(30)[1] is not None for j in jobs) and s.process.wait(20) == 0 and time.monotonic() - start < 10


def test_kill_9_and_restart(tiny):
    with Served(tiny, '--dtype', 'float32', patch=slow_down(.05)) as s:
        jobs = busy(s, 400)
        s.process.kill()
        assert all(j.result(30)[1] is not None for j in jobs)
    with Served(tiny, '--dtype', 'float32') as s: assert s.get('/health').status_code == 200 and consume_one(s)


def consume_one(s): return s.post('/v1/completions', dict(prompt='a', max_tokens=2)).status_code == 200


# --- the command

def run(*argv, **kw): return subprocess.run([sys.executable, '-c', 'import sys; from minivllm.cli import main; sys.exit(main())', *argv], capture_output=True, text=True, timeout=120, **kw)


def in_process(capsys, *argv):
    from minivllm.cli import main
    code = main(argv)
    return code, *capsys.readouterr()


def test_a_port_in_use_is_one_line(server, tiny, capsys):
    code, out, err = in_process(capsys, 'serve', str(tiny), '--port', str(server.port))
    assert code == 2 and str(server.port) in err and err.count('\n') == 1


@pytest.mark.parametrize('argv, env, words', [([], dict(MINIVLLM_PORT='http'), 'MINIVLLM_PORT'), (['--port', '99999'], {}, '99999'), (['--host', 'no.such.host.invalid'], {}, 'no.such.host'), (['--max-queue', '0'], {}, 'max_queue'), (['no/such/model.gguf'], {}, 'no/such')])
def test_mistakes_of_serve_are_one_line(argv, env, words, tiny, monkeypatch, capsys):
    for k, v in env.items(): monkeypatch.setenv(k, v)
    if words == 'max_queue': argv = [str(tiny), *argv]
    code, out, err = in_process(capsys, 'serve', '--port', '0', *argv)
    assert code == 2 and words in err and err.splitlines()[-1].startswith('minivllm: '), err


def test_help_lists_engine_and_server_options(capsys):
    with pytest.raises(SystemExit): in_process(capsys, 'serve', '--help')
    out = capsys.readouterr().out
    for flag in ('--host', '--port', '--api-key', '--max-queue', '--cors-origins', '--max-body-bytes', '--served-model-name', '--grace-period', '--max-num-batched-tokens', '--no-enable-prefix-caching', '--dtype', '--policy'): assert flag in out


def test_start_line(server): assert re.search(r'tiny is served at http://127\.0\.0\.1:\d+ .*; 2048 tokens of K/V fit, 512 in one sequence', server.log)


def test_chat_on_an_engine_and_on_a_server(server, tiny):
    lines = 'the quick brown fox\n/reset\nthe quick brown fox\n/exit\nnever\n'
    local = run('chat', '--model', str(tiny), '--dtype', 'float32', '--max-tokens', '6', input=lines)
    remote = run('chat', '--url', server.url + '/v1', '--max-tokens', '6', input=lines)
    assert 'leave it out with --url' in run('chat', '--url', 'http://x', '--block-size', '8', input='').stderr
    for r in local, remote: assert r.returncode == 0 and r.stderr.count('first token after') == 2 and 'tokens/s' in r.stderr, r.stderr
    assert local.stdout == remote.stdout and len(local.stdout) > 10
