"""What a vLLM engine's configuration means for the connector, or why it can't work. Knows vLLM by attribute names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, Literal, cast

from connector.settings import ConnectorSettings
from connector.validate import problems
from pdq.wire.tensor_parallel import shape_misfit

_KEYS = ("pdq_epoch", "pdq_side_channel_host", "pdq_side_channel_port", "pdq_connector", "pdq_layer_count_path")
_SIZES = (
    "pipeline_parallel_size",
    "data_parallel_size",
    "decode_context_parallel_size",
    "prefill_context_parallel_size",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginSettings:
    connector: ConnectorSettings
    """Host and port are set: rank r's side channel is there, at port + r."""
    engine_id: str
    epoch: str
    role: Literal["producer", "consumer", "both"]
    tp_size: int
    num_kv_heads: int
    """Of the whole model, 1 for MLA."""
    block_size: int
    num_blocks: int
    group: int
    """Index of the KV cache group that is transferred."""
    layers: tuple[str, ...]
    """Of that group."""
    layer_count_path: str = ""
    """File that rank 0 counts computed layers in (`layer_count`); empty: nobody reads it."""


def plugin_settings(vllm_config: Any, kv_cache_config: Any, *, host: str) -> PluginSettings:
    """`host`: where peers reach this machine, unless the configuration names another. Raises ValueError with all."""
    kv, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
    found = [
        f"{name} is {size}: the connector doesn't split KV that way, set it to 1"
        for name in _SIZES
        if (size := getattr(parallel, name, 1)) > 1
    ]
    device = vllm_config.device_config.device_type
    if device != "cpu":
        found.append(f"the KV cache is on device {device!r}: only 'cpu' is supported so far")
    extra = dict(kv.kv_connector_extra_config or {})
    found += [
        f"kv_connector_extra_config: unknown key {key!r}, known are {', '.join(_KEYS)}"
        for key in extra
        if key.startswith("pdq_") and key not in _KEYS
    ]
    try:
        connector = _connector_settings(extra, host=host, kv_port=kv.kv_port)
        found += problems(connector)
    except ValueError as error:
        found.append(str(error))
        connector = ConnectorSettings()
    model = vllm_config.model_config
    num_kv_heads = 1 if model.use_mla else model.get_total_num_kv_heads()
    tp_size = parallel.tensor_parallel_size
    if misfit := shape_misfit(tp_size, tp_size, num_kv_heads):
        found.append(misfit)
    last_port = connector.side_channel_port + tp_size - 1
    if not 1 <= connector.side_channel_port <= last_port <= 65535:
        found.append(
            f"side-channel ports {connector.side_channel_port} to {last_port} (one a rank) are not in 1 to 65535"
        )
    group = _group(kv_cache_config)
    if group is None:
        names = [type(group.kv_cache_spec).__name__ for group in kv_cache_config.kv_cache_groups]
        found.append(
            f"the model has {len(names)} KV cache groups ({', '.join(names)}), the connector moves one:"
            " try --disable-hybrid-kv-cache-manager, which makes one of them where it can"
        )
    if found:
        raise ValueError("pdq connector: " + "; ".join(found))
    assert group is not None
    spec = kv_cache_config.kv_cache_groups[group]
    return PluginSettings(
        connector=connector,
        engine_id=kv.engine_id,
        epoch=_text(extra, "pdq_epoch", f"{kv.engine_id}-{vllm_config.instance_id}"),
        role=cast(Literal["producer", "consumer", "both"], kv.kv_role.removeprefix("kv_")),
        tp_size=tp_size,
        num_kv_heads=num_kv_heads,
        block_size=spec.kv_cache_spec.block_size,
        num_blocks=kv_cache_config.num_blocks,
        group=group,
        layers=tuple(spec.layer_names),
        layer_count_path=_text(extra, "pdq_layer_count_path", "") if "pdq_layer_count_path" in extra else "",
    )


def _connector_settings(extra: Mapping[str, Any], *, host: str, kv_port: int) -> ConnectorSettings:
    given = extra.get("pdq_connector") or {}
    if not isinstance(given, Mapping):
        raise ValueError(f"pdq_connector: expected a table of connector settings, got {given!r}")
    known = {field.name: field.default for field in fields(ConnectorSettings)}
    values: dict[str, Any] = {}
    for name, value in given.items():
        if name not in known:
            raise ValueError(f"pdq_connector: unknown setting {name!r}, known are {', '.join(sorted(known))}")
        values[name] = _as_type_of(known[name], value, f"pdq_connector.{name}")
    settings = ConnectorSettings(**values)
    port = extra.get("pdq_side_channel_port", settings.side_channel_port or kv_port)
    host = _text(extra, "pdq_side_channel_host", str(given.get("side_channel_host", host)))
    return replace(settings, side_channel_host=host, side_channel_port=_as_type_of(0, port, "pdq_side_channel_port"))


def _as_type_of(default: object, value: Any, name: str) -> Any:
    assert default is not MISSING
    kind = type(default)
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise ValueError(f"{name}: expected {kind.__name__}, got {value!r}")
    return value


def _text(extra: Mapping[str, Any], key: str, default: str) -> str:
    value = extra.get(key, default)
    if not isinstance(value, str) or not value:
        raise ValueError(f"{key}: expected a text, got {value!r}")
    return value


def _group(kv_cache_config: Any) -> int | None:
    """The only group that takes part in transfers. None: there are several, or none."""
    groups: Sequence[Any] = kv_cache_config.kv_cache_groups
    ids = getattr(kv_cache_config, "transfer_group_ids", tuple(range(len(groups))))  # not in vLLM 0.23
    return ids[0] if len(ids) == 1 else None
