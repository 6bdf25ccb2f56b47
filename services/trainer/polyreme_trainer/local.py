"""A training engine in this process: the engine of a learner rank without a run, for programs of your own.

Invariant: a process has one engine at a time, because its ranks join one process group.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from polyreme.config.run import RunConfig
from polyreme.config.trainer import SftPhase
from polyreme.rundir.input_files import read_model_files
from polyreme.weights.manifest import ArenaSource
from polyreme_trainer.launch.ranks import local_rendezvous
from polyreme_trainer.learner.leader import Ranks
from polyreme_trainer.megatron.device import Device
from polyreme_trainer.megatron.engine import MegatronEngine
from polyreme_trainer.megatron.models.build import close_parallel, init_parallel
from polyreme_trainer.megatron.parallel.channel import BroadcastChannel
from polyreme_trainer.megatron.training.optimizer import Adam, adam_of
from polyreme_trainer.megatron.versions.version_writer import VersionWriter


class LocalEngine(MegatronEngine):
    """One rank's `Engine` with a trained policy, the role `actor`. `open` creates one."""

    def __init__(self, config: RunConfig, files: dict[str, bytes], ranks: Ranks, device: Device) -> None:
        super().__init__(config, files, ranks, device)
        self.config = config
        self.actor = self.add_policy("actor", config.model.path, trainable=True)
        self.actor.make_optimizer(adam_of(config.trainer.optimizer))
        self._writer: VersionWriter | None = None

    @classmethod
    @contextmanager
    def open(cls, config: RunConfig) -> Iterator["LocalEngine"]:
        """Loads the weights of `model.path`, and frees everything with the block. One rank sets torchrun's variables in this
        process's environment; of several, each has them already.

        Raises:
            ConfigError: the model cannot be trained, or `trainer.parallel` has other ranks than torchrun's variables.
        """
        parallel = config.trainer.parallel
        if parallel.world_size == 1:
            os.environ.update({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", **local_rendezvous()})
        device = Device(config.device, int(os.environ.get("LOCAL_RANK", "0")), parallel.threads)
        init_parallel(parallel, device)
        several = parallel.world_size > 1
        ranks = Ranks(int(os.environ["RANK"]), BroadcastChannel(device.torch) if several else None)
        try:
            device.seed(config.seed)
            engine = cls(config, read_model_files(config.model.path), ranks, device)
            try:
                yield engine
            finally:
                if engine._writer is not None:
                    engine._writer.close()
        finally:
            ranks.close()
            close_parallel()

    def begin_phase(self, phase: SftPhase) -> None:
        """Creates the actor's optimizer for a supervised phase."""
        self.actor.make_optimizer(Adam(beta2=phase.beta2, weight_decay=phase.weight_decay))

    def begin_iterations(self) -> None:
        """Creates the actor's optimizer for the iterations, after the supervised phases."""
        self.actor.make_optimizer(adam_of(self.config.trainer.optimizer))

    def publish(self, version: int) -> ArenaSource:
        """Writes the actor into shared memory, for `LocalSampler.load`. It stays there for two further versions."""
        if self._writer is None:
            run_id = f"{self.config.name}-{os.getpid()}"
            self._writer = VersionWriter(self.actor.model, self.ranks, run_id, writes=True).open()
        arena = self._writer.arena
        written = self._writer.write(version % arena.slots, version, term=0)
        assert written.manifest is not None
        return ArenaSource(str(arena.path), arena.nonce, written.slot, written.generation, written.manifest)
