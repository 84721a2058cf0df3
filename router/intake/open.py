"""Opens the intake of a router."""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

from pdserve.background import background
from router.admission import Door
from router.fleet.served_models import ModelFinder
from router.intake.answer_parsers import AnswerParsers
from router.intake.body_processes import BodyProcesses
from router.intake.fetch_images import ImageFetcher
from router.intake.intake import Intake
from router.intake.render_images import ImageRenderer
from router.intake.tokenizers import Tokenizers, fetch_tokenizer
from router.placement.residency import Residency

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from pdserve.config import RouterConfig
    from router.request_path import RequestPath
    from router.steps.ledger import ResidencyLedger
    from router.store.responses import ResponseStore


@asynccontextmanager
async def open_intake(
    config: RouterConfig, path: RequestPath, responses: ResponseStore, ledger: ResidencyLedger
) -> AsyncIterator[Intake]:
    """Open for the context what turns bytes into requests. `responses`: the stored
    conversations."""
    fleet, dialer = path.workers.fleet, path.workers.dialer
    models, metrics = path.models, path.metrics
    async with AsyncExitStack() as stack:
        fetcher = await stack.enter_async_context(ImageFetcher(config.images.url_hosts))
        images = ImageRenderer(fleet, dialer, fetcher, path.media_memory, metrics, ledger)
        stack.push_async_callback(images.close)
        tokenizers = Tokenizers(models.models, partial(fetch_tokenizer, fleet, dialer, path.peers))
        processes = BodyProcesses(metrics, most=config.body_processes)
        stack.push_async_callback(processes.close)
        intake = Intake(
            Door(path.admission.tenants, fleet.now, metrics.refused),
            ModelFinder(models.models, models.adapters, path.on_demand),
            tokenizers,
            processes,
            AnswerParsers(tokenizers, config.parsers),
            render=images.render,
            residency=Residency(config.residency, config.topology.labels, config.tenants),
            responses=responses,
            guards=path.guards,
            virtual_models={x.name: x for x in config.virtual_models},
            timeout_s=config.request_timeout_s,
        )
        stack.callback(intake.close)
        await stack.enter_async_context(background("tokenizers", tokenizers.preload))
        yield intake
