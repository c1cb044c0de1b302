"""Models of other people's libraries, each with rows and a loss of one's own in a few lines.

The libraries are no dependencies of samestep: `docs/models.md` says how to install them; each is imported when its
model is built. Sizes are small and odd, as everywhere in the table.
"""

# pyright: reportMissingImports=false

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import samestep
from model_table.entry import OF_IMAGES, OF_VECTORS, Entry, Loss, Row, numbers, stacked, without_tokens, words
from model_table.own_others import graph, graphs

Model = Callable[[], nn.Module]


def _classes(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return F.cross_entropy(output, target, reduction="sum"), len(output)


def _squares(output: Any, target: Tensor) -> tuple[Tensor, int]:
    """Squared error of every number, of diffusers' outputs too; the count is of samples."""
    output = getattr(output, "sample", output)
    return (output - target).square().flatten(1).mean(1).sum(), len(output)


def _next_tokens(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    """[samples, tokens, vocabulary], [samples, tokens]"""
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum"), target.numel()


def _text(index: int) -> Row:
    text = words(index, 13, 47)
    return {"x": text[:-1], "target": text[1:]}


def _image(index: int, name: str = "x", side: int = 32) -> Row:
    return {name: numbers(index, 3, side, side), "target": torch.tensor(index % 3)}


def _noised(index: int, name: str = "sample", side: int = 16, **others: Any) -> Row:
    noise = numbers(index + 90, 4, side, side)
    return {
        name: numbers(index, 4, side, side),
        "timestep": words(index, 1, 900)[0],
        **others,
        "target": noise,
    }


# Diffusers


def _unet() -> nn.Module:
    from diffusers import UNet2DModel

    blocks = {
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
    }
    widths = {"block_out_channels": (16, 24), "norm_num_groups": 4, "attention_head_dim": 8}
    return UNet2DModel(sample_size=16, in_channels=4, out_channels=4, layers_per_block=1, **blocks, **widths)


def _conditioned() -> nn.Module:
    from diffusers import UNet2DConditionModel

    down, up = ("CrossAttnDownBlock2D", "DownBlock2D"), ("UpBlock2D", "CrossAttnUpBlock2D")
    blocks: dict[str, Any] = {"down_block_types": down, "up_block_types": up, "block_out_channels": (16, 24)}
    sizes = {"sample_size": 16, "layers_per_block": 1, "norm_num_groups": 4, "attention_head_dim": 2}
    return UNet2DConditionModel(in_channels=4, out_channels=4, cross_attention_dim=20, **blocks, **sizes)


def _dit() -> nn.Module:
    from diffusers import DiTTransformer2DModel

    sizes = {"num_attention_heads": 4, "attention_head_dim": 6, "num_layers": 4, "norm_num_groups": 4}
    return DiTTransformer2DModel(in_channels=4, out_channels=4, sample_size=8, num_embeds_ada_norm=10, **sizes)


def _sd3() -> nn.Module:
    from diffusers import SD3Transformer2DModel

    sizes = {"num_attention_heads": 4, "attention_head_dim": 6, "num_layers": 4, "pos_embed_max_size": 8}
    widths = {"joint_attention_dim": 20, "caption_projection_dim": 24, "pooled_projection_dim": 18}
    return SD3Transformer2DModel(sample_size=8, patch_size=2, in_channels=4, out_channels=4, **sizes, **widths)


def _for_conditioned(index: int) -> Row:
    return _noised(index, encoder_hidden_states=numbers(index + 7, 5, 20))


def _for_dit(index: int) -> Row:
    return _noised(index, "hidden_states", 8, class_labels=torch.tensor(index % 10))


def _for_sd3(index: int) -> Row:
    text = {"encoder_hidden_states": numbers(index + 7, 5, 20), "pooled_projections": numbers(index + 8, 18)}
    return _noised(index, "hidden_states", 8, **text)


# Images


def _timm(name: str, **sizes: Any) -> nn.Module:
    import timm

    return timm.create_model(name, pretrained=False, num_classes=3, **sizes)


def _timm_vit() -> nn.Module:
    return _timm("vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=24, depth=4, num_heads=4)


def _timm_convnext() -> nn.Module:
    return _timm("convnext_atto", depths=(2, 2, 2, 2), dims=(8, 12, 16, 20))


def _timm_resnet() -> nn.Module:
    return _timm("resnet10t")


def _vit() -> nn.Module:
    from vit_pytorch import ViT

    return ViT(image_size=32, patch_size=8, num_classes=3, dim=24, depth=4, heads=4, dim_head=6, mlp_dim=38)


def _for_vit(index: int) -> Row:
    return _image(index, "img")


def _monai() -> nn.Module:
    from monai.networks.nets import UNet

    return UNet(spatial_dims=2, in_channels=3, out_channels=2, channels=(6, 10, 14), strides=(2, 2), num_res_units=1)


def _to_image(index: int) -> Row:
    image = numbers(index, 3, 32, 32)
    return {"x": image, "target": image[:2].abs()}


# Texts


def _x_decoder(**options: Any) -> nn.Module:
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(dim=24, depth=4, heads=4, attn_dim_head=6, **options)
    return TransformerWrapper(num_tokens=47, max_seq_len=16, attn_layers=layers)


def _x_alibi() -> nn.Module:
    return _x_decoder(alibi_pos_bias=True, alibi_num_heads=2)


class States(nn.Module):
    """Mamba blocks between an embedding and a head."""

    def __init__(self) -> None:
        from mambapy.mamba import Mamba, MambaConfig

        super().__init__()
        self.embed = nn.Embedding(47, 24)
        self.mamba = Mamba(MambaConfig(d_model=24, n_layers=4, d_state=4))
        self.head = nn.Linear(24, 47)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.mamba(self.embed(x)))


# Sounds, points, graphs, molecules, tables


def _conformer() -> nn.Module:
    from conformer import Conformer

    return Conformer(dim=24, depth=4, dim_head=6, heads=4, ff_mult=2, conv_kernel_size=7)


def _frames(index: int) -> Row:
    sound = numbers(index, 11, 24)
    return {"x": sound, "target": sound.roll(1, 0).abs()}


class Molecules(nn.Module):
    """EGNN layers over atoms with positions, and a number for each molecule."""

    def __init__(self) -> None:
        from egnn_pytorch import EGNN_Network

        super().__init__()
        self.net = EGNN_Network(num_tokens=9, num_positions=8, dim=16, depth=3)
        self.head = nn.Linear(16, 1)

    def forward(self, atoms: Tensor, places: Tensor) -> Tensor:
        hidden, _ = self.net(atoms, places)
        return self.head(hidden.mean(1)).squeeze(1)


def _molecule(index: int) -> Row:
    return {"atoms": words(index, 8, 9, 0), "places": numbers(index, 8, 3), "target": numbers(index + 40, 1)[0]}


def _numbers(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return (output.reshape(target.shape) - target).square().sum(), len(target)


class Equivariant(nn.Module):
    """Two tensor products of e3nn over vectors, and a number for each sample."""

    def __init__(self) -> None:
        from e3nn import o3

        super().__init__()
        self.one = o3.FullyConnectedTensorProduct("4x0e+4x1o", "4x0e+4x1o", "6x0e+6x1o")
        self.two = o3.FullyConnectedTensorProduct("6x0e+6x1o", "4x0e+4x1o", "3x0e")
        self.head = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.two(self.one(x, x), x))).squeeze(1)


def _vector(index: int, width: int) -> Row:
    return {"x": numbers(index, width), "target": numbers(index + 40, 1)[0]}


def _of_16(index: int) -> Row:
    return _vector(index, 16)


class Graphs(nn.Module):
    """A net of torch-geometric over a batch of graphs, and a number for each graph."""

    def __init__(self) -> None:
        from torch_geometric.nn import GAT

        super().__init__()
        self.net = GAT(in_channels=5, hidden_channels=12, num_layers=4, heads=2, v2=True)
        self.head = nn.Linear(12, 1)

    def forward(self, nodes: Tensor, edges: Tensor, owner: Tensor, empty: Tensor) -> Tensor:
        hidden = self.net(nodes, edges)
        sums = hidden.new_zeros(len(empty), 12).index_add(0, owner, hidden)
        return self.head(sums).squeeze(1)


def _tabnet() -> nn.Module:
    from pytorch_tabnet.tab_network import TabNet

    return TabNet(16, 1, n_d=8, n_a=8, n_steps=3, virtual_batch_size=1 << 20, group_attention_matrix=torch.eye(16))


def _first(output: Any, target: Tensor) -> tuple[Tensor, int]:
    return _numbers(output[0], target)


class Experts(nn.Module):
    """A mixture of experts of st-moe behind a linear layer, and a head of tokens."""

    def __init__(self) -> None:
        from st_moe_pytorch import MoE, SparseMoEBlock

        super().__init__()
        self.embed = nn.Embedding(47, 24)
        experts = MoE(dim=24, num_experts=4, gating_top_n=2, capacity_factor_train=8.0, is_distributed=False)
        self.moe = samestep.draws_along(SparseMoEBlock(experts), 1)  # [experts of a token, samples, tokens]
        self.head = nn.Linear(24, 47)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.moe(self.embed(x))[0])


def _deepfm() -> nn.Module:
    from deepctr_torch.inputs import DenseFeat, SparseFeat
    from deepctr_torch.models import DeepFM

    columns = [
        SparseFeat("user", 11, embedding_dim=6),
        SparseFeat("item", 13, embedding_dim=6),
        DenseFeat("price", 3),
    ]
    return DeepFM(columns, columns, dnn_hidden_units=(18, 14), l2_reg_linear=0, l2_reg_embedding=0, device="cpu")


def _clicked(index: int) -> Row:
    ids = torch.tensor([index % 11, index % 13], dtype=torch.float32)
    return {"X": torch.cat([ids, numbers(index, 3)]), "target": torch.tensor(float(index % 2))}


def _towers() -> nn.Module:
    from open_clip.model import CLIP

    vision = {"layers": 4, "width": 24, "head_width": 6, "patch_size": 8, "image_size": 32, "mlp_ratio": 2.0}
    text = {"context_length": 12, "vocab_size": 47, "width": 24, "heads": 4, "layers": 4}
    return CLIP(embed_dim=10, vision_cfg=vision, text_cfg=text)


def _pair(index: int) -> Row:
    return {"image": numbers(index, 3, 32, 32), "text": words(index, 12, 47), "target": torch.tensor(0)}


def _likeness(output: Any, target: Tensor, gather: samestep.Gather) -> tuple[Tensor, int]:
    """Of an image to its own text among those of the whole batch, and the other way round."""
    image, text, scale = output
    of_images = F.cross_entropy(scale * image @ gather(text).T, gather.rows(image), reduction="sum")
    return of_images + F.cross_entropy(scale * text @ gather(image).T, gather.rows(text), reduction="sum"), len(image)


_OF_GRAPHS = without_tokens("its layers take nodes and edges")
_OF_POINTS = without_tokens("its layers take points or atoms, each with every other")

# name, library, model, row, loss, what can't exist
_MODELS: tuple[tuple[str, str, Model, Callable[[int], Row], Loss, Mapping[str, str]], ...] = (
    ("diffusers-unet", "diffusers", _unet, _noised, _squares, OF_IMAGES),
    ("diffusers-conditioned", "diffusers", _conditioned, _for_conditioned, _squares, OF_IMAGES),
    ("diffusers-dit", "diffusers", _dit, _for_dit, _squares, {}),
    ("diffusers-sd3", "diffusers", _sd3, _for_sd3, _squares, {}),
    ("timm-vit", "timm", _timm_vit, _image, _classes, {}),
    ("timm-convnext", "timm", _timm_convnext, _image, _classes, OF_IMAGES),
    ("timm-resnet", "timm", _timm_resnet, _image, _classes, OF_IMAGES),
    ("vit-pytorch", "vit-pytorch", _vit, _for_vit, _classes, {}),
    ("open-clip", "open_clip", _towers, _pair, _likeness, {}),
    ("monai-unet", "monai", _monai, _to_image, _squares, OF_IMAGES),
    ("x-transformers", "x-transformers", _x_decoder, _text, _next_tokens, {}),
    ("x-alibi", "x-transformers", _x_alibi, _text, _next_tokens, {}),
    ("mambapy", "mambapy", States, _text, _next_tokens, {}),
    ("conformer-library", "conformer", _conformer, _frames, _squares, {}),
    ("egnn", "egnn-pytorch", Molecules, _molecule, _numbers, _OF_POINTS),
    ("e3nn", "e3nn", Equivariant, _of_16, _numbers, OF_VECTORS),
    ("pyg-gat", "torch-geometric", Graphs, graph, _numbers, _OF_GRAPHS),
    ("tabnet", "pytorch-tabnet", _tabnet, _of_16, _first, OF_VECTORS),
    ("st-moe", "st-moe-pytorch", Experts, _text, _next_tokens, {}),
    ("deepfm", "deepctr-torch", _deepfm, _clicked, _numbers, OF_VECTORS),
)


def entries() -> list[Entry]:
    return [
        Entry(
            name=name,
            kind=library,
            model=model,
            row=row,
            collate=graphs if row is graph else stacked,
            loss=loss,
            impossible=impossible,
            held_out=model is not Experts,
            half="library",
        )
        for name, library, model, row, loss, impossible in _MODELS
    ]
