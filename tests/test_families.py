"Logits and greedy tokens of every family are those of transformers, from checkpoints that transformers saved"
import json

import pytest
import torch
import transformers

from minivllm.model import ModelConfig, ModelError, reference_attend
from minivllm.weights import load_model, resolve_model
from tiny import tiny_llama

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

LLAMA3 = dict(factor=4., low_freq_factor=1., high_freq_factor=4., original_max_position_embeddings=32)
YARN = dict(factor=4., original_max_position_embeddings=32)
CASES = {
    'llama': ('llama', {}), 'llama-mha': ('llama', dict(num_key_value_heads=4)), 'llama-tied': ('llama', dict(tie_word_embeddings=True)),
    'llama-head_dim': ('llama', dict(head_dim=24)), 'llama-biases': ('llama', dict(attention_bias=True, mlp_bias=True)),
    'llama-gelu': ('llama', dict(hidden_act='gelu_pytorch_tanh')), 'llama-3-layers': ('llama', dict(num_hidden_layers=3)),
    'mistral': ('mistral', {}), 'mistral-window': ('mistral', dict(sliding_window=7)), 'mistral-head_dim': ('mistral', dict(head_dim=8, sliding_window=33)),
    'qwen2': ('qwen2', {}), 'qwen2-tied': ('qwen2', dict(tie_word_embeddings=True)),
    'qwen2-window': ('qwen2', dict(use_sliding_window=True, sliding_window=7, max_window_layers=1)),
    'qwen2-window-off': ('qwen2', dict(use_sliding_window=False, sliding_window=7, max_window_layers=0)),
    'qwen2-layer_types': ('qwen2', dict(use_sliding_window=True, sliding_window=7, layer_types=['sliding_attention', 'full_attention'])),
    'qwen3': ('qwen3', {}), 'qwen3-tied-128': ('qwen3', dict(tie_word_embeddings=True, head_dim=128)), 'qwen3-biases': ('qwen3', dict(attention_bias=True)),
    'qwen3-window': ('qwen3', dict(use_sliding_window=True, sliding_window=9, max_window_layers=0)),
}

def prompt(n=40): return torch.randint(4, 290, (n,), generator=torch.Generator().manual_seed(5))

def compare(folder):
    "Logits of a whole prompt within 1e-4, then 32 greedy tokens identical"
    ours = load_model(resolve_model(str(folder)))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    attend, ids = reference_attend(ours.config), prompt()
    with torch.no_grad(): want = theirs(ids[None]).logits[0]
    got = ours.compute_logits(ours(ids, torch.arange(len(ids)), attend))
    assert got.dtype == torch.float32 and want.std() > 1
    assert (got - want).abs().max() < 1e-4
    greedy = theirs.generate(ids[None], attention_mask=torch.ones(1, len(ids)), max_new_tokens=32, do_sample=False, eos_token_id=None, pad_token_id=0)[0]
    mine = ids
    for _ in range(32): mine = torch.cat([mine, ours.compute_logits(ours(mine, torch.arange(len(mine)), attend)[-1:]).argmax(-1)])
    assert mine.tolist() == greedy.tolist() and len(set(mine[40:].tolist())) > 1
    return ours

@pytest.mark.parametrize('case', CASES)
def test_family_equals_transformers(case, tmp_path):
    family, overrides = CASES[case]
    compare(tiny_llama(tmp_path, family, tokenizer=None, **overrides))

def test_explicit_values_are_used(tmp_path):
    "The variants above do differ: head_dim, windows, biases and norms reach the model"
    c = resolve_model(str(tiny_llama(tmp_path/'a', 'mistral', tokenizer=None, head_dim=8, sliding_window=33))).config
    assert (c.head_dim, c.sliding_windows, c.qkv_bias, c.qk_norm) == (8, (33, 33), False, False)
    c = resolve_model(str(tiny_llama(tmp_path/'b', 'qwen2', tokenizer=None, use_sliding_window=True, sliding_window=7, max_window_layers=1))).config
    assert (c.sliding_windows, c.qkv_bias, c.o_bias, c.mlp_bias) == ((None, 7), True, False, False)
    c = resolve_model(str(tiny_llama(tmp_path/'c', 'qwen3', tokenizer=None, attention_bias=True))).config
    assert (c.head_dim, c.qkv_bias, c.o_bias, c.qk_norm) == (16, True, True, True)

ROPES = {'linear': dict(factor=3.), 'llama3': LLAMA3, 'yarn': YARN, 'yarn-attention_factor': YARN | dict(attention_factor=1.5),
         'yarn-mscale': YARN | dict(mscale=.7, mscale_all_dim=.4), 'yarn-bounds': YARN | dict(beta_fast=8., beta_slow=2., truncate=False),
         'yarn-no-original': dict(factor=2.)}
SPELLINGS = {'type': lambda rope: dict(rope_scaling=rope | {'type': rope['rope_type'], 'rope_type': None}, rope_theta=500.),
             'rope_type': lambda rope: dict(rope_scaling=rope, rope_theta=500.),
             'theta-inside': lambda rope: dict(rope_scaling=rope | dict(rope_theta=500.)),
             'rope_parameters': lambda rope: dict(rope_parameters=rope | dict(rope_theta=500.)),
             'rope_parameters-theta-outside': lambda rope: dict(rope_parameters=rope, rope_theta=500.)}

def respell(folder, spelling, rope):
    "Write the rotary settings into config.json in one of the spellings"
    d = json.loads((folder/'config.json').read_text())
    for k in 'rope_parameters', 'rope_scaling', 'rope_theta': d.pop(k, None)
    d |= SPELLINGS[spelling](rope)
    for v in d.values():
        if isinstance(v, dict): [v.pop(k) for k in list(v) if v[k] is None]
    (folder/'config.json').write_text(json.dumps(d))
    return folder

@pytest.mark.parametrize('rope', ROPES)
def test_LD4_rope_kinds(rope, tmp_path):
    settings = dict(rope_type=rope.split('-')[0]) | ROPES[rope]
    ours = compare(respell(tiny_llama(tmp_path, tokenizer=None, max_position_embeddings=128), 'rope_parameters', settings))
    assert ours.config.rope.kind == settings['rope_type'] and ours.config.rope.theta == 500.

@pytest.mark.parametrize('spelling', SPELLINGS)
@pytest.mark.parametrize('rope', ['default', 'linear', 'llama3', 'yarn'])
def test_LD4_rope_spellings(rope, spelling, tmp_path):
    settings = dict(rope_type=rope) | ROPES.get(rope, {})
    ours = compare(respell(tiny_llama(tmp_path, 'qwen2', tokenizer=None), spelling, settings))
    assert ours.config.rope.kind == rope and ours.config.rope.theta == 500.

@pytest.mark.parametrize('rope', [dict(rope_type='dynamic', factor=2.), dict(type='longrope'), dict(type='mrope', mrope_section=[1]),
                                  dict(full_attention=dict(rope_type='default'), sliding_attention=dict(rope_type='linear'))])
def test_LD4_unknown_rope_refused(rope, tmp_path):
    folder = tiny_llama(tmp_path, tokenizer=None)
    d = json.loads((folder/'config.json').read_text()) | dict(rope_scaling=rope, rope_parameters=None)
    (folder/'config.json').write_text(json.dumps(d))
    with pytest.raises(ModelError, match='rope type .* is not supported'): resolve_model(str(folder))

def test_LD5_biases_used(tmp_path):
    "With the biases set to zero the logits change, so they were used before"
    folder = tiny_llama(tmp_path, tokenizer=None, attention_bias=True, mlp_bias=True)
    model = load_model(resolve_model(str(folder)))
    def logits(): return model.compute_logits(model(prompt(), torch.arange(40), reference_attend(model.config)))
    for part in 'qkv_proj', 'o_proj', 'gate_up_proj', 'down_proj':
        before = logits()
        for name, p in model.named_parameters():
            if name.endswith(f'{part}.bias'): p.zero_()
        assert (before - logits()).abs().max() > .01, part

@pytest.mark.parametrize('family', ['mistral', 'llama'])
def test_LD5_unexpected_biases_refused(family, tmp_path):
    "Biases in the file, but a config (or a family) that has none: refused, not dropped"
    folder = tiny_llama(tmp_path, 'llama', tokenizer=None, attention_bias=True)
    d = json.loads((folder/'config.json').read_text())
    d |= dict(architectures=['MistralForCausalLM'], sliding_window=None) if family == 'mistral' else dict(attention_bias=False)
    (folder/'config.json').write_text(json.dumps(d))
    with pytest.raises(ModelError, match="tensor 'model.layers.0.self_attn.*bias' is not used"): load_model(resolve_model(str(folder)))

TINY = dict(architectures=['LlamaForCausalLM'], vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)

@pytest.mark.parametrize('change, message', [
    (dict(architectures=['MixtralForCausalLM']), "architecture 'MixtralForCausalLM' is not supported"),
    (dict(architectures=None, model_type='gemma2'), "architecture 'gemma2' is not supported"),
    (dict(hidden_act='relu'), "hidden_act 'relu' is not supported"),
    (dict(hidden_size=None), 'no hidden_size'),
    (dict(num_key_value_heads=3), 'num_attention_heads=4 is not a multiple of num_key_value_heads=3'),
    (dict(head_dim=7), 'head_dim=7 is odd'),
    (dict(sliding_window=16), 'sliding_window=16'),
    (dict(partial_rotary_factor=.25), 'partial_rotary_factor=0.25'),
    (dict(rope_scaling=dict(type='linear')), "rope type 'linear' needs a factor"),
    (dict(quantization_config=dict(quant_method='gptq')), "'gptq'"),
    (dict(architectures=['Qwen2ForCausalLM'], num_key_value_heads=4, layer_types=['full_attention', 'linear_attention']), "layer type 'linear_attention' is not supported"),
    (dict(architectures=['Qwen2ForCausalLM'], num_key_value_heads=4, layer_types=['full_attention']), 'layer_types has 1 entries for num_hidden_layers=2')])
def test_config_refused(change, message):
    with pytest.raises(ModelError) as e: ModelConfig.from_dict(TINY | change)
    assert message in str(e.value) and '\n' not in str(e.value)

def test_config_defaults():
    "Absent keys mean what transformers means by them"
    for name in 'Llama', 'Mistral', 'Qwen2', 'Qwen3':
        d = TINY | dict(architectures=[f'{name}ForCausalLM'], num_attention_heads=32, hidden_size=128)
        ours, theirs = ModelConfig.from_dict(d), ModelConfig.from_dict(getattr(transformers, f'{name}Config')(**d).to_dict())
        for field in 'num_key_value_heads', 'head_dim', 'rms_norm_eps', 'max_position_embeddings', 'sliding_windows', 'rope', 'tie_word_embeddings', 'hidden_act':
            assert getattr(ours, field) == getattr(theirs, field), (name, field)

def test_eos_ids():
    for eos, ids in [(None, ()), (2, (2,)), ([3, 4], (3, 4))]: assert ModelConfig.from_dict(TINY | dict(eos_token_id=eos)).eos_token_ids == ids

@pytest.mark.parametrize('family', ['llama', 'qwen3'])
def test_bfloat16_rounds_like_transformers(family, tmp_path):
    "In bfloat16 the two differ by rounding in the products only, a small part of the spread of the logits"
    folder = tiny_llama(tmp_path, family, tokenizer=None, dtype=torch.bfloat16)
    ours = load_model(resolve_model(str(folder)), dtype='bfloat16')
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation='eager').eval()
    with torch.no_grad(): want = theirs(prompt()[None]).logits[0].float()
    got = ours.compute_logits(ours(prompt(), torch.arange(40), reference_attend(ours.config)))
    assert got.dtype == torch.float32 and (got - want).abs().mean() < .02*want.std()
