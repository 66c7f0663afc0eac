"Whatever the server's own OpenAPI document allows, and what it forbids, is sent to it: no 5xx, no hang, and it answers right after."
import os
import time

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, negative_data_rejection, status_code_conformance

from served import Served

EXAMPLES = int(os.environ.get('FUZZ_EXAMPLES', 40))   # for each operation; more on a quiet evening


@pytest.fixture(scope='module')
def server(tiny):
    with Served(tiny, '--dtype', 'float32', '--num-blocks', 64, '--max-queue', 64, '--client-timeout', 5) as s:
        yield s
        s.wait_idle()


@pytest.fixture(scope='module')
def api(server): return schemathesis.openapi.from_url(server.url + '/openapi.json')


def no_hang(ctx, response, case): assert response.elapsed < 20, f'{response.elapsed} s'


OPERATIONS = [('POST', '/v1/completions'), ('POST', '/v1/chat/completions'), ('POST', '/tokenize'), ('POST', '/detokenize'), ('GET', '/v1/models'), ('GET', '/v1/models/{model}'), ('GET', '/health'), ('GET', '/ping'), ('GET', '/version'), ('GET', '/metrics')]
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, no_hang]


def test_every_operation_is_fuzzed(api): assert {(o.ok().method.upper(), o.ok().path) for o in api.get_all_operations()} == set(OPERATIONS)


@pytest.mark.parametrize('mode', [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=lambda m: m.value)
@pytest.mark.parametrize('method, path', OPERATIONS)
def test_fuzz(server, api, method, path, mode):
    n = EXAMPLES if 'completions' in path else max(5, EXAMPLES // 4)
    if mode is GenerationMode.NEGATIVE and method == 'GET': return            # nothing that could be wrong
    @settings(max_examples=n, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate], derandomize=True, database=None)
    @given(case=api[path][method].as_strategy(generation_mode=mode))
    def run(case):
        if mode is GenerationMode.POSITIVE and isinstance(case.body, dict):
            case.body.pop('model', None)                                    # any text is allowed for it, and nearly all are 404
            more = sorted(set(case.body) - {'prompt', 'messages', 'tokens'})
            for k in more[:-3] if len(more) % 2 else more[3:]: del case.body[k]   # a few at a time: together they nearly always forbid each other
            if path == '/v1/completions' and isinstance(case.body.get('prompt'), list): case.body['prompt'] = case.body['prompt'][:8]
        case.call_and_validate(checks=CHECKS + [negative_data_rejection] * (mode is GenerationMode.NEGATIVE), timeout=30)
    run()


def test_after_the_fuzz_the_engine_answers(server):
    server.wait_idle(60)
    for path in '/v1/completions', '/v1/chat/completions':
        for status in '200', '400': assert server.metric('http_requests_total', handler=path, status=status) > EXAMPLES / 20          # both kinds were tried
    r = server.post('/v1/completions', dict(prompt='the cat', max_tokens=4, temperature=0, ignore_eos=True))
    assert r.status_code == 200 and r.json()['usage']['completion_tokens'] == 4
    assert server.get('/health').status_code == 200 and server.process.poll() is None
    assert 'Traceback' not in server.log, server.log[-3000:]


# --- what random bodies rarely hit: extreme numbers that are valid, one at a time and together

EXTREMES = [dict(temperature=1e-300), dict(temperature=1e300), dict(top_k=2**62), dict(top_k=10**30), dict(repetition_penalty=1e-300), dict(repetition_penalty=1e300), dict(min_p=1.), dict(top_p=1e-300), dict(seed=-2**63),
            dict(seed=2**64 - 1), dict(max_tokens=10**30), dict(min_tokens=16, stop_token_ids=list(range(300))), dict(truncate_prompt_tokens=10**30), dict(truncate_prompt_tokens=-1), dict(priority=2**31), dict(priority=-2**31), dict(logit_bias={str(i): -100 for i in range(300)}),
            dict(allowed_token_ids=[5], logit_bias={'5': -100}), dict(allowed_token_ids=list(range(300)), bad_words=['a', 'b', ' ']), dict(presence_penalty=2, frequency_penalty=-2, repetition_penalty=1e-10), dict(n=128, max_tokens=2),
            dict(stop=['\x00', '\u2028', '🙂' * 1000]), dict(logprobs=20, n=16, max_tokens=3), dict(prompt=[0]), dict(prompt='\x00'), dict(prompt='\u2028\u0085\ufeff'), dict(prompt=[299] * 400), dict(prompt=['a'] * 64, max_tokens=1), dict(stop_token_ids=[10**30]), dict(allowed_token_ids=[2]),
            dict(min_tokens=10**30), dict(logit_bias={'9' * 5000: 1}), dict(temperature=0, allowed_token_ids=[7], bad_words=['a' * 4096]), dict(cache_salt='\u0000'), dict(n=64, max_tokens=500, temperature=2.)]


@pytest.mark.parametrize('extra', EXTREMES, ids=lambda x: ','.join(x))
def test_extreme_but_well_formed(server, extra):
    for stream in False, True:
        start = time.monotonic()
        r = server.post('/v1/completions', dict(prompt='the cat', max_tokens=4, echo=True) | extra | dict(stream=stream))
        assert r.status_code in (200, 400, 429), (r.status_code, r.text)
        assert 'error' not in r.text or r.status_code != 200, r.text[:500]
        assert time.monotonic() - start < 60
    assert server.get('/health').status_code == 200
