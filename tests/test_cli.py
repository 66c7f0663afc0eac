"The command, as a user runs it."
import json
import subprocess
import sys
from pathlib import Path

import pytest


def run(*argv, **kw):
    return subprocess.run([Path(sys.executable).with_name('minivllm'), *argv], capture_output=True, text=True, timeout=300, **kw)


def test_says_paris():
    r = run('generate', 'The capital of France is')
    assert r.returncode == 0 and 'Paris' in r.stdout and 'first after' in r.stderr


def test_json_file_and_several_prompts(tmp_path):
    (tmp_path/'prompts.txt').write_text('One, two, three,\n\nRed, green,\n')
    r = run('generate', 'The capital of France is', '--file', str(tmp_path/'prompts.txt'), '--json', '--max-tokens', '4', '--dtype', 'float32')
    rows = [json.loads(l) for l in r.stdout.splitlines()]
    assert [x['prompt'] for x in rows] == ['The capital of France is', 'One, two, three,', 'Red, green,']
    assert all(x['usage']['completion_tokens'] == 4 and x['outputs'][0]['finish_reason'] == 'length' for x in rows)


def test_standard_input():
    r = run('generate', '--file', '-', '--max-tokens', '2', input='One, two,\n')
    assert r.returncode == 0, r.stderr


def test_seed_and_temperature_repeat():
    once = lambda seed: run('generate', 'Once', '--temperature', '1', '--max-tokens', '8', '--seed', seed).stdout
    assert once('7') == once('7') != once('8')


def test_chat_uses_the_template_once():
    r = run('generate', '--chat', 'What is the capital of France?', '--system', 'Answer in one word.', '--max-tokens', '12')
    assert 'Paris' in r.stdout, r.stderr


@pytest.mark.parametrize('argv, words', [
    ([], 'no prompt'),
    (['hi', '--model', 'no/such/folder/'], 'no/such/folder'),
    (['hi', '--temperature', '-1'], 'temperature'),
    (['hi', '--policy', 'best'], 'policy'),
    (['hi', '--attention-backend', 'best'], 'attention_backend'),
    (['hi', '--dtype', 'int3'], 'dtype'),
])
def test_a_mistake_is_one_line(argv, words):
    r = run('generate', *argv)
    assert r.returncode == 2 and words in r.stderr and r.stderr.count('\n') == 1 and not r.stdout, r.stderr


def test_help_lists_every_engine_argument():
    r = run('generate', '--help')
    for flag in ('--max-num-batched-tokens', '--no-enable-prefix-caching', '--kv-cache-memory', '--block-size', '--policy', '--threads', '--top-p'):
        assert flag in r.stdout


@pytest.fixture
def broken(tmp_path):
    "Five models that cannot be used, each with the words that must be said about it."
    from tiny import tiny_gguf, tiny_llama, tiny_model
    def save(name, **kw): return tiny_llama(tmp_path/name, **kw)
    truncated = tmp_path/'truncated.gguf'
    tiny_gguf(truncated, tiny_model('llama', vocab_size=300), 'F32')
    truncated.write_bytes(truncated.read_bytes()[:-1000])
    corrupt = save('corrupt')
    (corrupt/'model.safetensors').write_bytes(b'\xff' * 100)
    return [(['--model', str(tmp_path/'nowhere')], 'does not exist'), (['--model', str(truncated)], 'is truncated'), (['--model', str(corrupt)], 'cannot be read'),
            (['--model', str(save('mute', tokenizer=None))], 'no tokenizer'), (['--model', str(save('plain', chat_template=None)), '--chat'], 'no chat template')]


def test_an_unusable_model_is_one_line_that_says_what_to_do(broken, capsys):
    from minivllm.cli import main
    for argv, words in broken:
        assert main(['generate', 'hi', *argv]) == 2
        out, err = capsys.readouterr()
        assert words in err and err.count('\n') == 1 and not out, err
        assert any(advice in err for advice in ('give', 'download', 'add', 'pass')), err


def test_form_of_the_answer(tmp_path):
    import re
    (tmp_path/'schema.json').write_text('{"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["n"], "additionalProperties": false}')
    assert set(json.loads(run('generate', 'JSON:', '--json-schema', str(tmp_path/'schema.json')).stdout)) == {'n'}
    assert re.fullmatch('[0-9]{3}-[a-z]+', run('generate', 'Code:', '--regex', '[0-9]{3}-[a-z]{1,5}').stdout.strip())
    r = run('generate', 'hi', '--regex', '(')
    assert r.returncode == 2 and 'structured_outputs.regex cannot be compiled' in r.stderr and r.stderr.count('\n') == 1
