"""Leases that end although the worker lives, and a life that speaks after its end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc.aio

from benchmarks.chaos.orders import Order
from pdserve import rpc
from pdserve.v1 import worker_pb2 as w
from pdserve.v1.worker_pb2_grpc import RegistryStub

if TYPE_CHECKING:
    from benchmarks.chaos.scene import Scene

_RPC_S = 5.0


class ExpiredLease:
    """The router believes a worker dead that works on."""

    name = "expired_lease"
    what = "a decode worker renews its lease no more until it has ended, then goes on to renew it"
    needs_vllm = False

    async def run(self, scene: Scene) -> None:
        """Until the router says that it is lost."""
        await scene.until_open(1)
        name = "decode-0"
        scene.struck()
        scene.service.order(name, Order(renewals="stop"))
        try:
            await scene.service.until_state(name, "lost")
        finally:
            scene.service.order(name, Order())
        scene.note(f"{len(scene.load.open())} answers open when it was lost")


class OldEpoch:
    """What the last life of a worker had still to say comes after the new life has registered."""

    name = "old_epoch"
    what = (
        "a prefill worker is killed; once its next life serves, a renewal, a farewell and a "
        "registration of the old one arrive"
    )
    needs_vllm = False

    async def run(self, scene: Scene) -> None:
        """The registration is the worst: it says the same name."""
        name, pid = await scene.catch("prefill")
        entry = await scene.service.entry(name)
        assert entry is not None, "it was caught there"
        old = entry.info
        scene.service.kill_pid(pid)
        scene.load.hold()
        try:
            await scene.service.until_whole()
        finally:
            scene.load.go_on()
        async with rpc.open_channel(scene.service.grpc) as channel:
            registry = RegistryStub(channel)
            try:
                await registry.Renew(
                    w.RenewRequest(worker_id=name, epoch=old.epoch), timeout=_RPC_S
                )
                scene.note("the old renewal was TAKEN")
            except grpc.aio.AioRpcError as error:
                scene.note(f"renewal: {error.code().name}")
            await registry.Deregister(
                w.DeregisterRequest(worker_id=name, epoch=old.epoch), timeout=_RPC_S
            )
            scene.note(f"after the farewell {await _state(scene, name)}")
            try:
                await registry.Register(w.RegisterRequest(worker=old), timeout=_RPC_S)
                scene.note("registration: taken")
            except grpc.aio.AioRpcError as error:
                scene.note(f"registration: {error.code().name}")


async def _state(scene: Scene, name: str) -> str:
    entry = await scene.service.entry(name)
    return "" if entry is None else entry.state


EXPIRED_LEASE, OLD_EPOCH = ExpiredLease(), OldEpoch()
