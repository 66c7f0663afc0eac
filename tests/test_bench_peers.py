"`minivllm bench peers` as a user runs it: other engines in other processes, in turn; bad names and broken engines are one clear line."
import json, sys

import pytest
from tiny import tiny_llama

from minivllm.bench_peers import bench_peers, workloads

COMMON = '--repeat 1 --threads 1 --formats bfloat16'.split()

FAKE_VLLM = '''
from types import SimpleNamespace as S
class SamplingParams:
    def __init__(self, temperature, max_tokens, ignore_eos): assert temperature == 0 and ignore_eos; self.max_tokens = max_tokens
class LLM:
    def __init__(self, model, dtype, max_model_len, enable_prefix_caching, disable_log_stats): assert dtype == 'bfloat16' and not enable_prefix_caching
    def generate(self, prompts, params, use_tqdm):
        assert len(prompts) == len(params) and all(p['prompt_token_ids'] for p in prompts)
        return [S(outputs=[S(token_ids=[7]*(p.max_tokens - SHORT))]) for p in params]
'''


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    "A tiny model that knows every token of the workloads."
    return str(tiny_llama(tmp_path_factory.mktemp('peers')/'model', vocab_size=40_000, hidden_size=16, intermediate_size=32, max_position_embeddings=2048))


def test_against_transformers(folder, capfd, tmp_path):
    bench_peers(['--model', folder, '--peer', f'transformers={sys.executable}', '--workloads', 'latency,mixed', '--scale', '12', '--output', str(tmp_path/'all.json'), *COMMON])
    said = capfd.readouterr().out.splitlines()
    result = json.loads(said[-1])
    assert result == json.loads((tmp_path/'all.json').read_text()) and result['threads'] == 1
    rows = {(r['workload'], r['engine']): r for r in result['rows']}
    assert set(rows) == {(w, f'{e} bfloat16') for w in ('latency', 'mixed') for e in ('minivllm', 'transformers')}
    for (name, _), r in rows.items():
        reqs = workloads[name]()[::12]
        assert r['output_tokens_per_s']*r['seconds'] == pytest.approx(sum(n for _, n in reqs))
        assert r['total_tokens_per_s']*r['seconds'] == pytest.approx(sum(len(p) + n for p, n in reqs))
    one = rows['latency', 'minivllm bfloat16']
    assert one['ttft_ms'] + 63*one['tpot_ms'] == pytest.approx(1000*one['seconds'])
    assert result['ceiling']['copy'] > 0 and result['ceiling']['product'] > 0
    assert sum('x as fast' in line for line in said) == 3 and any('of a copy' in line for line in said)


def with_vllm(folder, tmp_path, monkeypatch, short):
    (tmp_path/'vllm.py').write_text(FAKE_VLLM.replace('SHORT', str(short)))
    monkeypatch.setenv('PYTHONPATH', str(tmp_path))
    bench_peers(['--model', folder, '--peer', f'vllm={sys.executable}', '--workloads', 'batch8', '--scale', '4', *COMMON])


def test_vllm_is_asked_as_it_wants(folder, tmp_path, monkeypatch, capfd):
    with_vllm(folder, tmp_path, monkeypatch, 0)
    assert {r['engine'] for r in json.loads(capfd.readouterr().out.splitlines()[-1])['rows']} == {'minivllm bfloat16', 'vllm bfloat16'}


def test_an_engine_that_does_less_work_is_not_called_fast(folder, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match='vllm bfloat16 made 126 tokens where 128 were asked'): with_vllm(folder, tmp_path, monkeypatch, 1)


def test_an_engine_that_is_not_there(folder):
    with pytest.raises(ValueError, match='llama.cpp gguf does not run|vllm bfloat16 does not run'):
        bench_peers(['--model', folder, '--peer', f'vllm={sys.executable}', '--workloads', 'latency', *COMMON])


@pytest.mark.parametrize('args, says', [(['--peer', 'tgi=python'], 'tgi'), (['--peer', 'vllm'], 'interpreter'), (['--workloads', 'latency,none'], "'none'"), (['--formats', 'int3'], "'int3'")])
def test_bad_arguments(args, says):
    with pytest.raises(ValueError, match=says): bench_peers(args)
