"What several test files share: the demo model, the same weights in transformers, and a tiny random checkpoint."
import os
from functools import cache

os.environ.setdefault('HF_HUB_OFFLINE', '1')

import pytest
import torch

torch.set_num_threads(int(os.environ.get('OMP_NUM_THREADS', 2)))
if not torch.cuda.is_available(): os.environ['TRITON_INTERPRET'] = '1'    # before anybody imports triton


def pytest_configure(config): config.addinivalue_line('markers', 'cuda: needs a GPU')

def pytest_runtest_setup(item):
    if item.get_closest_marker('cuda') and not torch.cuda.is_available(): pytest.skip('no GPU here')


@pytest.fixture(scope='session')
def demo_files():
    from minivllm.weights import resolve_model
    return resolve_model('smollm2-135m')


@pytest.fixture(scope='session')
def demo_hf():
    "The demo model as transformers reads it from the GGUF file, fp32: `(model, tokenizer)`."
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from minivllm.weights import fetch_demo
    path = fetch_demo()
    folder, file = str(path.parent), path.name
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(folder, gguf_file=file)


@pytest.fixture(scope='session')
def greedy_hf(demo_hf):
    "Greedy continuation of a prompt of ids, by transformers, alone: `greedy_hf(ids, n) -> ids`."
    model, _ = demo_hf

    @cache
    @torch.inference_mode()
    def run(ids, n):
        return model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=n, pad_token_id=2)[0, len(ids):].tolist()
    return lambda ids, n: run(tuple(ids), n)


@pytest.fixture(scope='session')
def tiny(tmp_path_factory):
    "Folder of a tiny random Llama with a byte-level tokenizer."
    from tiny import tiny_llama
    return tiny_llama(tmp_path_factory.mktemp('tiny'))
