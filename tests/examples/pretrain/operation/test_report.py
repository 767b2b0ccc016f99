"""What a run shows at its end: when an optimizer reaches AdamW's loss."""

from examples.pretrain.operation.report import reaching

STEPS = (10, 20, 30, 40)


def rows(*losses):
    validated = [
        {"step": str(step), "val_loss": str(loss)}
        for step, loss in zip(STEPS, losses, strict=True)
    ]
    return [{"step": "1", "val_loss": ""}, *validated]


def test_when_an_optimizer_reaches_adamws_final_loss():
    adamw = rows(4.0, 3.5, 3.0, 2.5)
    assert reaching(rows(4.0, 3.0, 2.0, 1.0), adamw) == "25 steps (62%)"
    assert reaching(rows(4.0, 3.9, 3.8, 3.7), adamw) == "not reached"
    # The first validation is as early as can be said.
    assert reaching(rows(1.0, 0.5, 0.5, 0.5), adamw) == "10 steps (25%)"
    assert reaching(adamw, None) == ""
