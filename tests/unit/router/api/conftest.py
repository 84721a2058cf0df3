"""Both APIs of the router on real sockets, with a scripted generator."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import aiohttp
import openai
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from pdserve.client import Client
from pdserve.config import RouterConfig, SloConfig
from pdserve.model.tokenizer import Tokenizer as ModelTokenizer
from pdserve.model.tokenizer import read_files
from pdserve.net import rpc
from pdserve.net.http_server import HttpServer, bind
from pdserve.security.browsers import BrowserGuard
from pdserve.types import ModelInfo
from pdserve.v1.generation_pb2_grpc import add_GenerationServicer_to_server
from router.admission import AdmissionController, AdmissionLimits, Door, Tenants
from router.api.auth import EVERYONE, Keys
from router.api.batch.http import BatchApi
from router.api.body_process import BodyProcesses, LargeBodies
from router.api.console.http import Console
from router.api.generation import GenerationApi
from router.api.grpc import GenerationService
from router.api.http import HttpApi
from router.api.idempotency import StoredAnswers
from router.api.models import ModelsApi
from router.api.open_requests import OpenRequests
from router.api.openapi import openapi
from router.api.pooling import PoolingApi
from router.api.preprocess import Preprocessor
from router.api.route_table import LINES, ROUTES, Handlers
from router.api.status import StatusApi
from router.api.stored_responses import ResponseApi
from router.api.tokenizer import TokenizerApi
from router.fleet.accounting import Accounting
from router.fleet.registry import Fleet
from router.metrics import RouterMetrics
from router.request.pooling import Embedder
from router.request.suspects import Suspects
from router.store.store import open_store
from tests.support.router_apis import (
    CORS_ORIGIN,
    MAX_BODY_BYTES,
    MAX_MODEL_LEN,
    MODEL,
    TEMPLATE,
    TIMEOUT_S,
    VOCAB_SIZE,
    FakeRenderer,
    RouterApis,
    ScriptedGenerator,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from router.api.console.views import Sources
    from router.operations.adapters import Adapters


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
async def apis(
    generator: ScriptedGenerator,
    rendered: FakeRenderer,
    keys: Keys,
    tenants: Tenants,
    large: int,
    tmp_path: Path,
) -> AsyncIterator[RouterApis]:
    async with AsyncExitStack() as stack:
        open_requests = OpenRequests()
        preprocessor = Preprocessor(
            generator.models,
            generator.adapters,
            timeout_s=TIMEOUT_S,
            load=read_tokenizer,
            render=rendered,
        )
        # There is no worker that computes embeddings.
        admission = AdmissionController(AdmissionLimits())
        metrics = RouterMetrics(SloConfig())
        accounting = Accounting({}, metrics.count)
        fleet = Fleet()
        embedder = Embedder(
            fleet,
            links={},
            admission=admission,
            metrics=metrics,
            accounting=accounting,
            suspects=Suspects(fleet, {}, max_deaths=2),
        )
        door = Door(tenants, asyncio.get_running_loop().time, metrics.refused)
        processes = BodyProcesses(metrics, larger_than=large)
        stack.push_async_callback(processes.close)
        stack.callback(preprocessor.close)
        config = RouterConfig(store=str(tmp_path / "store"))
        store = await stack.enter_async_context(open_store(config, "router"))
        large_bodies = LargeBodies(preprocessor, processes)
        responses = ResponseApi(store.responses, metrics)
        adapters = cast("Adapters", generator)
        sources = cast("Sources", None)  # of the console, which has tests with a whole router
        handlers = Handlers(
            generation=GenerationApi(
                generator,
                preprocessor,
                open_requests,
                large=large_bodies,
                door=door,
                responses=responses,
                answers=StoredAnswers(),
            ),
            responses=responses,
            pooling=PoolingApi(
                embedder, preprocessor, open_requests, large=large_bodies, door=door
            ),
            tokenizer=TokenizerApi(preprocessor, large_bodies, door),
            models=ModelsApi(generator, adapters),
            batches=BatchApi(
                store.files, store.batches, max_file_bytes=MAX_BODY_BYTES, endpoints=LINES
            ),
            status=StatusApi(
                generator,
                open_requests,
                lambda _: (b"pdserve_up 1\n", "text/plain"),
                partial(openapi, ROUTES),
            ),
            console=Console(sources, keys, open_requests),
        )
        api = HttpApi(handlers, keys, BrowserGuard([CORS_ORIGIN], checks_host=keys.is_open))
        sock = bind("127.0.0.1", 0)
        host, port = sock.getsockname()
        web = HttpServer(api.handle, sock, max_body_bytes=MAX_BODY_BYTES)
        await web.start()
        stack.push_async_callback(web.stop)
        server = rpc.make_server()
        add_GenerationServicer_to_server(
            GenerationService(
                generator, preprocessor, open_requests, door=door, large=large_bodies, keys=keys
            ),
            server,
        )
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
            session=await stack.enter_async_context(aiohttp.ClientSession()),
            client=await stack.enter_async_context(Client(grpc_address)),
        )


@pytest.fixture
async def official(apis: RouterApis) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{apis.url}/v1", api_key="none", max_retries=0
    ) as client:
        yield client
