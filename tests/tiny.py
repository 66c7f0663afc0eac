"Tiny random checkpoints for tests, saved by transformers: `tiny_llama(folder, family, tokenizer, **config_overrides)`"
import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CHATML = ("{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
          "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}")
TEXT = 'the quick brown fox jumps over the lazy dog and the cat sat on the mat while the rain in Spain stays mainly in the plain'
FAMILIES = 'llama', 'mistral', 'qwen2', 'qwen3'

def bytes_tokenizer():
    "Byte-level BPE: 4 special tokens, 256 bytes, 40 merges; no BOS is added. Returns (tokenizer, its config)"
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer, tok.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tok.post_processor = processors.ByteLevel(trim_offsets=False)
    special = ['<|endoftext|>', '<|im_start|>', '<|im_end|>', '<|pad|>']
    tok.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=300, special_tokens=special, show_progress=False,
                                                        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return tok, dict(tokenizer_class='PreTrainedTokenizerFast', bos_token='<|im_start|>', eos_token='<|im_end|>', pad_token='<|pad|>')

def byte_fallback_tokenizer():
    "SentencePiece-like BPE (as Llama 2): <unk> <s> </s>, 256 byte tokens, letters and a few words; BOS is added, what is unknown is spelled in bytes"
    letters = '▁abcdefghijklmnopqrstuvwxyzS'
    merges = [('t', 'h'), ('th', 'e'), ('▁', 'the'), ('a', 'n'), ('an', 'd'), ('▁', 'and'), ('▁', 'a'), ('▁', '▁')]
    tokens = ['<unk>', '<s>', '</s>', *[f'<0x{b:02X}>' for b in range(256)], *letters, *[a + b for a, b in merges]]
    tok = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, merges, unk_token='<unk>', byte_fallback=True, fuse_unk=True))
    tok.normalizer = normalizers.Sequence([normalizers.Prepend('▁'), normalizers.Replace(' ', '▁')])
    tok.decoder = decoders.Sequence([decoders.Replace('▁', ' '), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(' ', 1, 0)])
    tok.post_processor = processors.TemplateProcessing('<s> $A', '<s> $A $B', [('<s>', 1)])
    tok.add_special_tokens([AddedToken(t, special=True) for t in ('<unk>', '<s>', '</s>')])
    return tok, dict(tokenizer_class='PreTrainedTokenizerFast', bos_token='<s>', eos_token='</s>', unk_token='<unk>', add_bos_token=True)

TOKENIZERS = {'bytes': bytes_tokenizer, 'byte_fallback': byte_fallback_tokenizer}

def tiny_model(family='llama', seed=0, **overrides):
    "A tiny random transformers model whose scores have clear margins: no near-ties, answers that depend on the whole prompt"
    import torch, transformers
    name = dict(llama='Llama', mistral='Mistral', qwen2='Qwen2', qwen3='Qwen3')[family]
    sizes = dict(vocab_size=300, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                 max_position_embeddings=512, rms_norm_eps=1e-5, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2) | (
                 dict(head_dim=16) if family == 'qwen3' else {}) | (dict(sliding_window=None) if family == 'mistral' else {})
    model = getattr(transformers, name + 'ForCausalLM')(getattr(transformers, name + 'Config')(**sizes | overrides)).eval()
    gen = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for n, p in model.named_parameters():
            std, mean = (.1, 1.) if 'norm' in n else (1., 0.) if 'embed' in n or 'lm_head' in n else (.2, 0.)
            p.normal_(mean, std, generator=gen)
    return model

def tiny_llama(folder, family='llama', tokenizer='bytes', chat_template=CHATML, seed=0, max_shard_size='5GB', dtype=None, **config_overrides):
    """Save a tiny random checkpoint (2 layers, hidden 64, about 300 tokens) into `folder` and return it.
    family: 'llama', 'mistral', 'qwen2', 'qwen3'; tokenizer: 'bytes', 'byte_fallback' or None; chat_template: text or None."""
    folder = Path(folder)
    if tokenizer:
        tok, config = TOKENIZERS[tokenizer]()
        config_overrides = dict(vocab_size=tok.get_vocab_size()) | config_overrides
    model = tiny_model(family, seed, **config_overrides)
    if dtype is not None: model = model.to(dtype)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    if tokenizer:
        tok.save(str(folder/'tokenizer.json'))
        (folder/'tokenizer_config.json').write_text(json.dumps(config))
        if chat_template: (folder/'chat_template.jinja').write_text(chat_template)
    return folder

# ---- GGUF, written by the gguf library

GGUF_NAMES = {'self_attn.q_norm': 'attn_q_norm', 'self_attn.k_norm': 'attn_k_norm', 'model.embed_tokens': 'token_embd', 'model.norm': 'output_norm', 'lm_head': 'output',
              'self_attn.q_proj': 'attn_q', 'self_attn.k_proj': 'attn_k', 'self_attn.v_proj': 'attn_v', 'self_attn.o_proj': 'attn_output',
              'mlp.gate_proj': 'ffn_gate', 'mlp.up_proj': 'ffn_up', 'mlp.down_proj': 'ffn_down',
              'input_layernorm': 'attn_norm', 'post_attention_layernorm': 'ffn_norm', 'model.layers.': 'blk.'}
SCALES_AT = {'Q2_K': (80, 82), 'Q3_K': (108,), 'Q4_K': (0, 2), 'Q5_K': (0, 2), 'Q6_K': (208,), 'IQ4_XS': (0,)}   # where a block keeps its 16-bit floats

def random_blocks(shape, kind, seed=0):
    "Random bytes of a type that the gguf library cannot quantize to, with small finite scales: uint8 `[rows, bytes]`"
    import gguf, numpy as np
    per_block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    rng = np.random.default_rng(seed)
    b = rng.integers(0, 256, (shape[0]*shape[1]//per_block, size), dtype=np.uint8)
    for at in SCALES_AT[kind]: b[:, at:at+2] = (rng.normal(size=(len(b), 1))*.001).astype(np.float16).view(np.uint8)
    return b.reshape(shape[0], -1)

def tiny_gguf(path, model, kind='F32', tokenizer=None, rope_freqs=None, metadata=None):
    """Write a transformers model (from `tiny_model`) as a GGUF file; matrices in `kind`, the rest F32.
    tokenizer: 'bytes' or None; rope_freqs: divisors of the rotary speeds; metadata: more key -> value pairs (int, float or str)."""
    import gguf, numpy as np
    c, arch = model.config, {'mistral': 'llama'}.get(model.config.model_type, model.config.model_type)
    w, kinds = gguf.GGUFWriter(path, arch), gguf.GGMLQuantizationType
    w.add_context_length(c.max_position_embeddings); w.add_embedding_length(c.hidden_size); w.add_block_count(c.num_hidden_layers)
    w.add_feed_forward_length(c.intermediate_size); w.add_head_count(c.num_attention_heads); w.add_head_count_kv(c.num_key_value_heads)
    w.add_layer_norm_rms_eps(c.rms_norm_eps); w.add_rope_freq_base(c.rope_parameters['rope_theta'])
    w.add_vocab_size(c.vocab_size)
    if arch == 'qwen3': w.add_key_length(c.head_dim); w.add_value_length(c.head_dim)
    for k, v in (metadata or {}).items(): {int: w.add_uint32, float: w.add_float32, str: w.add_string}[type(v)](k, v)
    if tokenizer:
        tok, config = TOKENIZERS[tokenizer]()
        inner, vocab = json.loads(tok.to_str())['model'], tok.get_vocab()
        special = {t['content'] for t in json.loads(tok.to_str())['added_tokens']}
        w.add_tokenizer_model('gpt2'); w.add_tokenizer_pre('gpt-2')
        tokens = sorted(vocab, key=vocab.get)
        w.add_token_list(tokens); w.add_token_types([3 if t in special else 1 for t in tokens]); w.add_token_merges([' '.join(m) for m in inner['merges']])
        w.add_bos_token_id(vocab[config['bos_token']]); w.add_eos_token_id(vocab[config['eos_token']])
        w.add_chat_template(CHATML)
    if rope_freqs is not None: w.add_tensor('rope_freqs.weight', np.asarray(rope_freqs, dtype=np.float32))
    for i, (name, t) in enumerate(model.state_dict().items()):
        if name == 'lm_head.weight' and c.tie_word_embeddings: continue
        t = t.float().numpy()
        heads = c.num_attention_heads if 'q_proj' in name else c.num_key_value_heads if 'k_proj' in name else 0
        if heads and arch == 'llama': t = np.ascontiguousarray(t.reshape(heads, 2, -1, *t.shape[1:]).swapaxes(1, 2)).reshape(t.shape)
        for theirs, ours in GGUF_NAMES.items(): name = name.replace(theirs, ours)
        q = kinds[kind if t.ndim == 2 else 'F32']
        w.add_tensor(name, random_blocks(t.shape, kind, i) if q.name in SCALES_AT else gguf.quants.quantize(t, q), raw_dtype=q)
    w.write_header_to_file(); w.write_kv_data_to_file(); w.write_tensors_to_file(); w.close()
    return Path(path)
