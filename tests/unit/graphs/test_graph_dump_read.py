"""Reading a graph that torchair wrote: a small one, as it writes them."""

from __future__ import annotations

import pytest

from mtp_runtime.graphs import dump
from mtp_runtime.graphs.dump import DumpError, Shape


def attribute(key: str, text: str) -> str:
    return f'    attr {{\n        key: "{key}"\n        value {{\n            s: {text!r}\n        }}\n    }}\n'


def node(name: str, op: str, inputs: tuple[str, ...] = (), **texts: str) -> str:
    given = "".join(f'    input: "{source}"\n' for source in inputs)
    return (
        f'node {{\n    name: "{name}"\n    op: "{op}"\n{given}{"".join(attribute(*one) for one in texts.items())}}}\n'
    )


def tensor(*dims: int) -> str:
    body = "".join(f"  dim: {dim}\n" for dim in dims)
    return f'name: "y"\ndtype: DT_BF16\nshape {{\n{body}}}\nlayout: "ND"\n'


def graph(first: int = 36) -> str:
    names = 'list {\n  s: "query"\n  s: "pse_shift"\n  s: "actual_seq_lengths"\n  s: "actual_seq_lengths_kv"\n}\n'
    between = 'name: "query"\ndtype: DT_BF16\nlayout: "ND"\nattr {\n  value {\n    s: "Tensor(dtype=torch.bfloat16, '
    return "".join(
        (
            node("q", "Data", **{"[o]y": tensor(first, 8, 512)}),
            node("Const", "Const", _readable_value='s: "[18, 36]"\n'),
            node(
                "FIA",
                "FusedInferAttentionScore",
                ("q:0", "", "Const:0", "step:1"),
                input_layout='s: "TND"\n',
                scale="f: 0.5\n",
                num_heads="i: 8\n",
                softmax_lse_flag="b: false\n",
                _input_name_key=names,
                **{"[i]query": between + 'shape=torch.Size([s85, 8, 512])"\n  }\n}\n'},
            ),
        )
    )


def test_nodes_attributes_and_sources() -> None:
    found = dump.read(graph())
    assert list(found) == ["q", "Const", "FIA"]
    assert found["FIA"].inputs == {"query": "q", "actual_seq_lengths": "Const", "actual_seq_lengths_kv": "step"}
    (call,) = dump.attention_calls(found)
    assert call == {
        "input_layout": "TND",
        "scale": 0.5,
        "num_heads": 8,
        "softmax_lse_flag": False,
        "actual_seq_lengths": [18, 36],
        "actual_seq_lengths_kv": None,
    }


def test_shapes() -> None:
    found = dump.read(graph())
    assert dump.inputs(found) == {"q": Shape("DT_BF16", (36, 8, 512))}
    assert dump.dynamic_inputs(found) == {}
    # Between operators torch's shape stands in, its symbols unknown.
    assert dump.dynamic(found) == ["FIA i:query"]
    assert found["FIA"].shapes["i:query"].dims == (dump.UNKNOWN, 8, 512)


def test_an_unknown_dimension_of_an_input() -> None:
    found = dump.read(graph(-1))
    assert dump.dynamic_inputs(found) == {"q": Shape("DT_BF16", (-1, 8, 512))}
    assert "q o:y" in dump.dynamic(found)


@pytest.mark.parametrize("text", ["", "no graph", "node {\n}\n"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(DumpError):
        dump.read(text)
