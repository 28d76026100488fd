"""The number of active drafts of a running server: GET and POST /v1/mtp/active_k.

Entry point group `vllm.endpoint_plugins`, name `mtp_runtime`. vLLM's own middleware wants the server's API key for
everything below /v1, before a request gets here.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from fastapi import APIRouter, FastAPI, HTTPException, Request
from pydantic import BaseModel, ConfigDict

PATH = "/v1/mtp/active_k"
router = APIRouter(tags=["mtp"])


class Wanted(BaseModel):
    """Body of a POST: the active K from the next step on."""

    model_config = ConfigDict(extra="forbid", strict=True)

    active_k: int


class State(BaseModel):
    """The answer: drafts a request gets each step now, and the most it can get."""

    active_k: int
    loaded_k: int


class ActiveK:
    """See `vllm.plugins.endpoint_plugins.interface.EndpointPlugin`."""

    name = "mtp_runtime"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes."""
        app.include_router(router)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Keep what reaches the engine cores."""
        state.mtp_engine = engine_client


@router.get(PATH)
async def read_active_k(request: Request) -> State:
    """Active and loaded K. 409 where MTP is off."""
    return await _state(request)


@router.post(PATH)
async def set_active_k(wanted: Wanted, request: Request) -> State:
    """Set the active K of every engine core, from its next step on. 400 outside 0..loaded K, 409 where MTP is off.

    Requests that run go on. Drafts that are under way are still verified.
    """
    loaded = (await _state(request)).loaded_k
    if not 0 <= wanted.active_k <= loaded:
        raise HTTPException(400, f"active_k {wanted.active_k}: use 0 to {loaded}, the K that this server has loaded")
    await _call(request, "mtp_set_active_k", wanted.active_k)
    return await _state(request)


async def _state(request: Request) -> State:
    found = await _call(request, "mtp_active_k")
    if None in found:
        raise HTTPException(409, "MTP is off on this server: it has no drafter whose K could change")
    if len(set(map(tuple, found))) > 1:
        raise HTTPException(409, f"the engine cores disagree about active and loaded K: {found}; ask again")
    active, loaded = found[0]
    return State(active_k=active, loaded_k=loaded)


async def _call(request: Request, method: str, *arguments: Any) -> list[Any]:
    """One result an engine core; with data parallelism there are several."""
    found: list[Any] = await request.app.state.mtp_engine.engine_core.call_utility_all_async(method, *arguments)
    return found
