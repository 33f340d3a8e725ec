"""A transfer rule of one's own: the weighted geometric mean of both distributions.

python examples/own_transfer.py
rapid eval --rules examples/own_transfer.py --task laptop-quick --mode fused --transfer geometric
"""

import rapid


def geometric(target_probs, draft_probs, eta):
    weight = eta / (1 + eta)
    return target_probs ** (1 - weight) * draft_probs**weight


rapid.register_transfer("geometric", geometric)

if __name__ == "__main__":
    text = "The banner of Tezawe is sozo sema 40. The well of Ruki is dry. "
    with rapid.open("embedded:target", drafter="embedded:drafter") as pair:
        settings = {"mode": "fused", "transfer": "geometric", "eta": 1}
        answer = pair.answer("What is the banner of Tezawe?", documents=[text * 3], **settings)
    print(answer.text, "|", answer.receipt.contract, "by", answer.receipt.transfer)
