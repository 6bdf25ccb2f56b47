"""Only torch's AdamW steps fragments."""

from types import SimpleNamespace

import pytest
import torch

from polyreme.errors import ConfigError
from polyreme_trainer.megatron.offload.fragments import find_fragments


def test_an_adam_of_another_package_is_refused() -> None:
    """The stub has the attributes of megatron-core's optimizers that the function reads."""
    param = torch.nn.Parameter(torch.ones(3))
    for kind, accepted in ((torch.optim.AdamW, True), (torch.optim.Adam, False)):
        adam = kind([param])
        inner = SimpleNamespace(optimizer=adam, param_groups=adam.param_groups)
        if accepted:
            assert [each.stop for each in find_fragments([("weight", param)], inner)] == [3]
        else:
            with pytest.raises(ConfigError, match="transformer-engine"):
                find_fragments([("weight", param)], inner)
