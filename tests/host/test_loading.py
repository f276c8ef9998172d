"""What is said of a host's number format is what it takes."""

import time

import pytest
import torch
from torch import nn

from conftest import make_model
from probemon.host.loading import slow_number


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_format_is_called_slow_where_texts_take_longer_in_it(dtype):
    def least_seconds(number):
        layer, states = nn.Linear(1024, 1024, bias=False, dtype=number), torch.randn(512, 1024).to(number)
        taken = []
        for _ in range(5):
            begin = time.process_time()  # other work on the machine falls on neither
            layer(states)
            taken.append(time.process_time() - begin)
        return min(taken)

    with torch.inference_mode():
        times = least_seconds(dtype) / least_seconds(torch.float32)
    said = slow_number(make_model().to(dtype))
    assert said == (str(dtype).removeprefix("torch.") if times > 1.7 else ""), times
