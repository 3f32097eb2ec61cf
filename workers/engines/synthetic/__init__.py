"""A deterministic engine without a model, for benchmarks and fault tests. Its speed does not predict a real engine's.

Tokens, logprobs and routed experts are functions of the weights and of the earlier tokens. A test can therefore check
every split of a request into attempts and every change of weights. Seeded sampling also depends on the number of tokens
that this attempt has generated, like the state of a real random generator. Penalties also depend on the tokens of this
attempt. A resumed request therefore differs exactly where a request of a real engine would differ.
"""
