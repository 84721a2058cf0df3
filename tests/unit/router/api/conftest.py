"""Both APIs of the router on real sockets, with a scripted generator."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, cast

import aiohttp
import openai
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from pdserve.client import Client
from pdserve.config import SloConfig, StoreConfig
from pdserve.model.tokenizer import Tokenizer as ModelTokenizer
from pdserve.model.tokenizer import read_files
from pdserve.net import rpc
from pdserve.net.http_server import HttpServer, bind
from pdserve.observe.audit import AuditLog
from pdserve.observe.logs import LineLog
from pdserve.security.browsers import BrowserGuard
from pdserve.types import ModelInfo, ModelWeights
from pdserve.v1.generation_pb2_grpc import add_GenerationServicer_to_server
from router.admission import Door, Tenants
from router.api.auth import EVERYONE, Keys
from router.api.batch.http import BatchApi
from router.api.console.http import Console
from router.api.generation import GenerationApi
from router.api.grpc import GenerationService
from router.api.http import HttpApi
from router.api.idempotency import StoredAnswers
from router.api.models import ModelsApi
from router.api.open_requests import CallLog, OpenRequests
from router.api.openapi import openapi
from router.api.pooling_endpoints import PoolingApi
from router.api.route_table import LINES, ROUTES, Handlers
from router.api.shared import SharedParts
from router.api.status import StatusApi
from router.api.stored_responses import ResponseApi
from router.api.tokenizer import TokenizerApi
from router.api.weights import WeightsApi
from router.attempt.pooling_placer import PoolingPlacer
from router.fleet.peers import RegionPeers
from router.fleet.registry import Fleet
from router.guardrails.guard import NO_GUARDS
from router.intake.body_processes import BodyProcesses
from router.metrics import RouterMetrics
from router.placement.decisions import DecisionLog
from router.steps.ledger import NO_LEDGER
from router.steps.log import make_log
from router.store.store import open_store
from router.virtual.chooser import ModelChooser
from tests.support.router_apis import (
    CORS_ORIGIN,
    MAX_BODY_BYTES,
    MAX_MODEL_LEN,
    MODEL,
    TEMPLATE,
    VOCAB_SIZE,
    FakeRenderer,
    RouterApis,
    ScriptedGenerator,
    make_intake,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from router.attempt.answer import Embeds
    from router.control.adapters import Adapters
    from router.control.open import WorkerControl
    from router.control.weights import WeightUpdates
    from router.guardrails.guard import Guards
    from router.request_path import RequestPath
    from router.virtual.forecast import Forecast


class Weights:
    """Weights that change at once."""

    def model_named(self, name: str) -> str:
        return name or "demo"

    def is_paused(self, model: str) -> bool:
        return False

    def laggards(self, model: str) -> dict[str, str]:
        return {}

    async def pause(self, model: str, mode: str, timeout_s: float) -> None:
        pass

    async def resume(self, model: str) -> None:
        pass

    async def update(self, model: str, path: str, *more: object) -> ModelWeights:
        return ModelWeights(1, "1", path)


class OneModel:
    """A fleet with a model and no workers."""

    members: ClassVar[dict[str, Any]] = {}

    def models(self) -> dict[str, Any]:
        return {"demo": SimpleNamespace(path="")}

    def weights_of(self, model: str) -> ModelWeights:
        return ModelWeights()

    def of_model(self, model: str) -> list[Any]:
        return []


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a model directory with a tokenizer of single bytes and a chat template."""
    directory = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=261,
        special_tokens=["<|end|>", "<|system|>", "<|user|>", "<|assistant|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["a"], trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"eos_token": "<|end|>", "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    return directory


async def read_tokenizer(model: ModelInfo) -> ModelTokenizer:
    """Load the tokenizer from the model's directory."""
    return ModelTokenizer.load(read_files(Path(model.path)))


@pytest.fixture
def rendered() -> FakeRenderer:
    return FakeRenderer()


@pytest.fixture
def generator(model_dir: Path) -> ScriptedGenerator:
    info = ModelInfo(MODEL, str(model_dir), MAX_MODEL_LEN, VOCAB_SIZE, "float32")
    return ScriptedGenerator({MODEL: info})


@pytest.fixture
def token_ids(model_dir: Path) -> Callable[[str], tuple[int, ...]]:
    """Return a function from text to the token ids of the test's tokenizer."""
    fast = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    return lambda text: tuple(fast.encode(text, add_special_tokens=False).ids)


@pytest.fixture
def keys() -> Keys:
    """Return the keys that the APIs require: none, unless a test module overrides this."""
    return EVERYONE


@pytest.fixture
def tenants() -> Tenants:
    return Tenants()


@pytest.fixture
def large() -> int:
    """Return the body size above which bodies are parsed in another process."""
    return MAX_BODY_BYTES


@pytest.fixture
def guards() -> Guards:
    """Return the guards of prompts: none, unless a test module overrides this."""
    return NO_GUARDS


@pytest.fixture
async def apis(
    generator: ScriptedGenerator,
    rendered: FakeRenderer,
    keys: Keys,
    tenants: Tenants,
    large: int,
    guards: Guards,
    tmp_path: Path,
) -> AsyncIterator[RouterApis]:
    async with AsyncExitStack() as stack:
        open_requests = OpenRequests()
        metrics = RouterMetrics(SloConfig())
        door = Door(tenants, asyncio.get_running_loop().time, metrics.refused)
        processes = BodyProcesses(metrics, larger_than=large)
        stack.push_async_callback(processes.close)
        config = StoreConfig(database=str(tmp_path / "store"))
        store = await stack.enter_async_context(open_store(config, "router"))
        intake = make_intake(
            generator.models,
            read_tokenizer,
            generator.adapters,
            processes=processes,
            door=door,
            render=rendered,
            responses=store.responses,
            guards=guards,
        )
        stack.callback(intake.close)
        responses = ResponseApi(store.responses, metrics)
        adapters = cast("Adapters", generator)
        no_path = cast("RequestPath", None)  # the console has tests with a whole router
        no_control = cast("WorkerControl", None)
        audit = AuditLog(LineLog(str(tmp_path / "audit.log"), "log.audit"))
        access_log = LineLog(str(tmp_path / "access.log"), "log.access")
        log = make_log(100)
        calls = CallLog(metrics, log, asyncio.get_running_loop().time, access_log)
        no_forecast = cast("Forecast", None)  # without virtual models
        chooser = ModelChooser(intake, generator, no_forecast, {}, DecisionLog(0), metrics.count)
        shared = SharedParts(keys, intake, chooser, open_requests, calls, audit, NO_LEDGER)
        handlers = Handlers(
            generation=GenerationApi(shared, responses, StoredAnswers()),
            responses=responses,
            pooling=PoolingApi(
                cast("Embeds", None),
                PoolingPlacer(Fleet()),  # without a worker that computes embeddings
                shared,
            ),
            tokenizer=TokenizerApi(shared),
            models=ModelsApi(generator, adapters, shared),
            weights=WeightsApi(
                cast("WeightUpdates", Weights()), cast("Fleet", OneModel()), audit, is_on=True
            ),
            batches=BatchApi(
                store.files, store.batches, max_file_bytes=MAX_BODY_BYTES, endpoints=LINES
            ),
            status=StatusApi(
                generator,
                RegionPeers(""),
                open_requests,
                lambda _: (b"pdserve_up 1\n", "text/plain"),
                partial(openapi, ROUTES),
            ),
            console=Console(no_path, no_control, shared),
        )
        browsers = BrowserGuard([CORS_ORIGIN], checks_host=keys.is_open)
        api = HttpApi(handlers, calls, keys, browsers)
        sock = bind("127.0.0.1", 0)
        host, port = sock.getsockname()
        web = HttpServer(api.handle, sock, max_body_bytes=MAX_BODY_BYTES)
        await web.start()
        stack.push_async_callback(web.stop)
        server = rpc.make_server()
        add_GenerationServicer_to_server(GenerationService(generator, shared), server)
        grpc_address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        stack.push_async_callback(server.stop, 0)
        yield RouterApis(
            url=f"http://{host}:{port}",
            host=host,
            port=port,
            grpc_address=grpc_address,
            generator=generator,
            open_requests=open_requests,
            metrics=metrics,
            log=log,
            session=await stack.enter_async_context(aiohttp.ClientSession()),
            client=await stack.enter_async_context(Client(grpc_address)),
        )


@pytest.fixture
async def official(apis: RouterApis) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{apis.url}/v1", api_key="none", max_retries=0
    ) as client:
        yield client
