"""What changes logits before any token is drawn, proposed or judged from them."""
