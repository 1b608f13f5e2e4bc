"""The layer where models are trained and served: transformers, Megatron-Core's and torchtitan's conventions, LoRA.

Each module needs only what it integrates with, and only when it is used.
"""
