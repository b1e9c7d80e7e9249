"""Gates in timm: a network by name, a gate in timm's own slot, and what `probe` sees of both."""

import torch

import attractor as at


def main() -> None:
    try:
        import timm
    except ImportError:
        print("this example needs timm, whose networks it takes: pip install timm")
        return
    from attractor.integrations.timm import attn_layer, register

    register()
    print("in timm's registry now:", ", ".join(timm.list_models("*stepnet*")))

    torch.manual_seed(0)
    images = torch.randn(4, 3, 64, 64)
    options = {"num_classes": 10, "zero_init_last": False}  # timm would start with branches of 0
    networks = {
        "resnet34": timm.create_model("resnet34", **options),
        "resnet34_stepnet": timm.create_model("resnet34_stepnet", **options),
        "resnet34 + srm": timm.create_model(
            "resnet34", block_args={"attn_layer": attn_layer("srm")}, **options
        ),
    }
    print(f"{'untrained':>18} {'parameters':>12} {'blocks':>6} {'gated':>6} {'mean NSI':>9}")
    for name, model in networks.items():
        count = sum(p.numel() for p in model.parameters())
        found = at.probe(model, [images])
        gated = int((~found.gates.isnan()).all(0).sum())
        print(f"{name:>18} {count:12,} {len(found.names):6} {gated:6} {found.nsi.mean():9.3f}")

    features = timm.create_model("resnet34_stepnet", features_only=True, out_indices=(1, 2, 3, 4))
    print("features:", [list(maps.shape[1:]) for maps in features(images)])


if __name__ == "__main__":
    main()
