"The demo model says what transformers says, token for token, in fp32."
import pytest

from minivllm import LLM, SamplingParams

PROMPTS = {
    'english': 'The capital of France is',
    'story': 'Once upon a time, in a small village by the sea, there lived',
    'chinese': '从前有座山，山上有座庙，',
    'code': 'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n',
    'emoji': 'I ❤️ 🍕 and 👨‍👩‍👧‍👦 because',
    'numbers': '1, 1, 2, 3, 5, 8, 13, 21,',
    'one token': 'The',
    'markup': '<|im_start|>user\nWhat is the KV cache?<|im_end|>\n<|im_start|>assistant\n',
    'spaces': '   a   list:\n\n\t- one\n\t- two\n',
    'long': None,
}


@pytest.fixture(scope='module')
def llm(): 
    with LLM(dtype='float32') as llm: yield llm


def prompt_ids(llm, name):
    if name != 'long': return llm.tokenizer.encode(PROMPTS[name])
    return (llm.tokenizer.encode('The cache grows by one row for every token that is read. ') * 200)[:1500]


def test_tokenizer_is_transformers(llm, demo_hf):
    for p in filter(None, PROMPTS.values()): assert llm.tokenizer.encode(p) == demo_hf[1](p).input_ids


@pytest.mark.parametrize('name', PROMPTS)
def test_greedy_alone(llm, greedy_hf, name):
    ids = prompt_ids(llm, name)
    [out] = llm.generate([ids], SamplingParams(temperature=0, max_tokens=64), use_tqdm=False)
    assert out.outputs[0].token_ids == greedy_hf(ids, 64)


def test_greedy_in_one_batch(llm, greedy_hf):
    ids = [prompt_ids(llm, n) for n in PROMPTS]
    outs = llm.generate(ids, SamplingParams(temperature=0, max_tokens=64), use_tqdm=False)
    for i, o in zip(ids, outs): assert o.outputs[0].token_ids == greedy_hf(i, 64)


def test_says_paris(llm):
    assert 'Paris' in llm.generate('The capital of France is', SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)[0].outputs[0].text


def test_chat_is_generate_over_the_template(llm, demo_hf):
    messages = [dict(role='user', content='Name three colors.')]
    params = SamplingParams(temperature=0, max_tokens=24)
    [out] = llm.chat(messages, params, use_tqdm=False)
    assert out.prompt_token_ids == demo_hf[1].apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert out.outputs[0].text == llm.generate([out.prompt_token_ids], params, use_tqdm=False)[0].outputs[0].text
