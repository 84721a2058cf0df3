"""What requests cost on workers: fitted from what workers measure, predicted before placement."""
