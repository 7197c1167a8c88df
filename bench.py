"""bench.py: every figure about nanoserve is a command, run on your machine.

    python bench.py throughput                         64 requests at once, then one stream
    python bench.py throughput --quick                 the same in small, under 50 s on 2 cores
    python bench.py throughput --peer transformers=venv/bin/python       and another engine: vllm,
                           openvino, llamacpp, transformers-continuous, each with its interpreter
    python bench.py throughput --help                  all options, the engine's included
    python bench.py kernels                            operators against what this machine can do
    python bench.py kernels --static                   compiled for four GPUs: spills, roofline
    python bench.py quant                              weight and KV formats: quality beside speed
    python bench.py spec                               what drafting gains, and where it does not
    python bench.py latency | prefix | chunk | switches    what people feel (bench_serving.py)
    python bench.py streams --url http://localhost:8000    the server beside the engine alone
    python bench.py lesson all                         the articles' examples (lessons.py)

A measurement prints its own command line, the commit, the machine, versions and (throughput) the
size of the KV cache, then medians; the last line on stdout is one JSON object with every value.

CONTENTS
     1  Workload and machine
     2  Entrants
     3  Running entrants
     4  throughput
     5  Command line
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import importlib.metadata
import json
import math
import os
import platform
import random
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

if __name__ != "__main__" or sys.argv[1:2] != ["entrant"]:
    # A peer's interpreter runs this file too, as "entrant" (section 3), and has other packages.
    import torch
    import bench_plot
    import nanoserve


# ==================================================================================================
# 1  Workload and machine
# ==================================================================================================
# Problem: a rate without its workload and machine cannot be compared with anything.  Idea: the work
# is a function of a seed, and every result carries what it was measured on.
#
#     seed ─► lengths and ids of the prompts, lengths of the outputs ─► one JSON file for everybody
#
# Invariant: all entrants get the same ids and must return exactly the number of tokens asked for.
# Why: ids, not text: no tokenizer takes part, and random ids share no prefix for a cache to skip.

def make_workload(num_prompts, seed, vocab_size, prompt_lens=(32, 256), output_lens=(32, 256)):
    """(prompts, output lengths): random ids and lengths, uniform over the inclusive ranges.

    Special tokens live at the ends of a vocabulary, so the ids keep away from them.
    """
    rng, margin = random.Random(seed), min(100, vocab_size // 4)
    draw_id = lambda: rng.randrange(margin, vocab_size - margin)
    prompts = [[draw_id() for _ in range(rng.randint(*prompt_lens))] for _ in range(num_prompts)]
    return prompts, [rng.randint(*output_lens) for _ in range(num_prompts)]

def describe_machine():
    """Processor, cores, the units that decide the speed of a matrix product, memory, load."""
    cpu = read_fields("/proc/cpuinfo")
    units = {"avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile"}
    units &= set(cpu.get("flags", "").split())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return dict(cpu=cpu.get("model name", platform.machine()), cores=os.cpu_count(),
                units=" ".join(sorted(units)), memory_gib=round(memory, 1),
                load=round(os.getloadavg()[0], 2), system=platform.platform(terse=True))

def read_fields(path):
    """{name: value} of a file of "name: value" lines in /proc; empty where there is none."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return {}  # not Linux
    pairs = (line.split(":", 1) for line in lines if ":" in line)
    return {name.strip(): value.strip() for name, value in pairs}

def describe_commit():
    """Commit of the folder this file is in, "-dirty" when tracked files differ from it."""
    command = ["git", "-C", Path(__file__).parent, "describe", "--always", "--dirty", "--abbrev=10"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() or "no git"

def describe_run(**facts):
    """Command, commit, machine, versions and these facts: printed first, and part of the JSON
    object. What a command prints behind them is measured, unless it says computed or quoted."""
    command = shlex.join(["python", Path(sys.argv[0]).name, *sys.argv[1:]])
    head = dict(command=command, commit=describe_commit(), machine=describe_machine(),
                versions=versions_of("torch", "triton"), **{"source": "measured", **facts})
    for key, value in head.items():
        print(f"{key:14s} {show_dict(value) if isinstance(value, dict) else value}")
    return head

def show_dict(pairs):
    return ", ".join(f"{key} {value}" for key, value in pairs.items())

def versions_of(*packages):
    """{package: version} of those installed in this interpreter."""
    found = {"python": platform.python_version()}
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


# ==================================================================================================
# 2  Entrants
# ==================================================================================================
# Problem: engines differ in their interface, and a benchmark measures that difference by accident.
# Idea: an entrant is a class with four methods, and the clocks that compare are outside of it.
#
#     __init__(job)                        load the model
#     batch(prompts, output_lens)          -> token ids of each, everything at once
#     stream(prompt, count, on_token)      call on_token(token_id) when a token is there
#     facts()                              -> dict: versions, format, what explains the figures
#
# Invariant: greedy, the end-of-sequence token does not end anything, ids in and ids out.
# Simplification: a peer runs with its own defaults, except where the work would differ.
# Try: add a row to ENTRANTS: python bench.py throughput --quick --peer NAME=PYTHON runs it.

DTYPES = {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16"}

class Nanoserve:
    """This repository, in-process."""
    def __init__(self, job):
        import nanoserve
        self.job = job
        self.params = functools.partial(nanoserve.SamplingParams, temperature=0, ignore_eos=True,
                                        detokenize=False)
        self.llm = nanoserve.LLM(job["model"], dtype=DTYPES[job["dtype"]], **job["options"])
        self.phases = {}  # {"batch" or "stream": seconds of each phase}

    def batch(self, prompts, output_lens):
        params = [self.params(max_tokens=count) for count in output_lens]
        with self.phases_of("batch"):
            outputs = self.llm.generate(prompts, params, use_tqdm=False)
        for output in outputs:
            if output.error:
                raise ValueError(f"a request failed: {output.error}")
        return [output.outputs[0].token_ids for output in outputs]

    def stream(self, prompt, count, on_token):
        self.llm.core.reset_prefix_cache()  # the prompt may have been in the batch
        with self.phases_of("stream"):
            for delta in self.llm.stream(prompt, self.params(max_tokens=count)):
                for token_id in delta.outputs[0].token_ids:
                    on_token(token_id)

    @contextlib.contextmanager
    def phases_of(self, name):
        """Keep what the engine's clock counts meanwhile, as self.phases[name]."""
        clock = self.llm.core.clock
        clock.lap("idle")
        before = dict(clock.totals)
        yield
        clock.lap("idle")
        spent = {phase: seconds - before.get(phase, 0.0) for phase, seconds in clock.totals.items()}
        self.phases[name] = {phase: seconds for phase, seconds in spent.items() if seconds > 0}

    def facts(self):
        import bench_limits
        core, stats = self.llm.core, self.llm.core.stats()  # of the work, without what follows
        steps = bench_limits.measure_steps(self.llm, self.job["context"],
                                           self.job["stream_len"] // 4)
        forms = " + ".join(core.runner.model.matrix_bytes()[1])
        return dict(versions=versions_of("torch", "triton", "safetensors", "tokenizers"),
                    format=f"{forms}, {self.job['dtype']} inputs",
                    kv_blocks=len(core.scheduler.kv.pool.blocks),
                    block_size=core.config.block_size, report=core.report, stats=stats,
                    phases=self.phases, steps=steps)

class Transformers:
    """transformers' generate(): one batch, padded on the left, run to the longest output's end."""
    def __init__(self, job):
        import torch
        import transformers
        transformers.logging.set_verbosity_error()
        use_cpu = job["options"].get("device") == "cpu" or not torch.cuda.is_available()
        self.torch, self.device = torch, "cpu" if use_cpu else "cuda"
        self.format = DTYPES[job["dtype"]]
        load = transformers.AutoModelForCausalLM.from_pretrained
        self.model = load(job["model"], dtype=getattr(torch, DTYPES[job["dtype"]])).to(self.device)
        self.model.generation_config.eos_token_id = None  # nothing ends before its length

    def generate(self, prompts, count, streamer=None):
        longest, torch = max(map(len, prompts)), self.torch
        input_ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
        mask = torch.zeros_like(input_ids)
        for i, prompt in enumerate(prompts):
            input_ids[i, longest - len(prompt) :] = torch.tensor(prompt)
            mask[i, longest - len(prompt) :] = 1
        ids = self.model.generate(
            input_ids.to(self.device), attention_mask=mask.to(self.device), do_sample=False,
            max_new_tokens=count, pad_token_id=0, streamer=streamer)
        return ids[:, longest:].tolist()

    def batch(self, prompts, output_lens):
        rows = self.generate(prompts, max(output_lens))
        return [row[:count] for row, count in zip(rows, output_lens)]  # the rest is padding

    def stream(self, prompt, count, on_token):
        # A streamer gets the prompt first, (1, length), then tokens, (1,).
        put = lambda token_ids: on_token(int(token_ids)) if token_ids.dim() == 1 else None
        self.generate([prompt], count, types.SimpleNamespace(put=put, end=lambda: None))

    def facts(self):
        return dict(versions=versions_of("torch", "transformers"), format=self.format)

class ContinuousTransformers(Transformers):
    """transformers' generate_batch(): continuous batching over a paged cache."""
    def batch(self, prompts, output_lens):
        from transformers import GenerationConfig
        config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0,
                                  max_new_tokens=max(output_lens))  # one length for all
        done = self.model.generate_batch(inputs=prompts, generation_config=config,
                                         progress_bar=False)
        rows = sorted(done.items(), key=lambda item: int(item[0].rpartition("_")[2]))
        return [row.generated_tokens[:count] for (_, row), count in zip(rows, output_lens)]

class Vllm:
    """vLLM's LLM class in this process; its own defaults decide about compilation."""
    def __init__(self, job):
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
        import vllm
        self.format = DTYPES[job["dtype"]]
        self.params = functools.partial(vllm.SamplingParams, temperature=0, ignore_eos=True,
                                        detokenize=False)
        self.llm = vllm.LLM(job["model"], dtype=DTYPES[job["dtype"]], skip_tokenizer_init=True,
                            max_model_len=2304, max_num_seqs=len(job["prompts"]),
                            enable_prefix_caching=False)

    def batch(self, prompts, output_lens):
        done = self.llm.generate([{"prompt_token_ids": ids} for ids in prompts],
                                 [self.params(max_tokens=n) for n in output_lens], use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in done]

    def stream(self, prompt, count, on_token):
        engine, seen = self.llm.llm_engine, 0
        engine.add_request("stream", {"prompt_token_ids": prompt}, self.params(max_tokens=count))
        while engine.has_unfinished_requests():
            for output in engine.step():
                for token_id in output.outputs[0].token_ids[seen:]:
                    on_token(token_id)
                seen = len(output.outputs[0].token_ids)

    def facts(self):
        return dict(versions=versions_of("torch", "vllm", "vllm-cpu"), format=self.format)

class OpenVino:
    """OpenVINO GenAI's continuous batching on the CPU, from the GGUF file itself."""
    def __init__(self, job):
        self.format = gguf_format(job)
        import numpy
        import openvino
        import openvino_genai
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size, scheduler.max_num_seqs = 2, len(job["prompts"])  # GB
        scheduler.max_num_batched_tokens, scheduler.enable_prefix_caching = 2048, False
        scheduler.dynamic_split_fuse = True
        self.pipe = openvino_genai.ContinuousBatchingPipeline(job["gguf"], scheduler, "CPU")
        self.Config, self.count = openvino_genai.GenerationConfig, 0
        self.tensor = lambda ids: openvino.Tensor(numpy.array([ids], dtype=numpy.int64))

    def add(self, prompt, count):
        config, self.count = self.Config(), self.count + 1
        config.max_new_tokens = config.min_new_tokens = count
        config.ignore_eos, config.do_sample = True, False
        return self.pipe.add_request(self.count, self.tensor(prompt), config)

    def batch(self, prompts, output_lens):
        handles = [self.add(prompt, count) for prompt, count in zip(prompts, output_lens)]
        while self.pipe.has_non_finished_requests():
            self.pipe.step()
        return [list(handle.read_all()[0].generated_ids) for handle in handles]

    def stream(self, prompt, count, on_token):
        handle = self.add(prompt, count)
        while self.pipe.has_non_finished_requests():
            self.pipe.step()
            while handle.can_read():
                for output in handle.read().values():
                    for token_id in output.generated_ids:
                        on_token(token_id)

    def facts(self):
        return dict(versions=versions_of("openvino-genai"), format=self.format)

class LlamaCpp:
    """llama.cpp's server in this process (xllamacpp), from the GGUF file. It tells how many tokens
    it made, not which (-1), unless it is also asked for their probabilities, which costs."""
    def __init__(self, job):
        self.format = gguf_format(job)
        import xllamacpp
        params, count = xllamacpp.CommonParams(), len(job["prompts"])
        params.model.path, params.n_parallel, params.n_ctx = job["gguf"], count, 2304 * count
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = os.cpu_count()
        params.n_batch, params.n_ubatch, params.warmup, params.verbosity = 2048, 512, False, 0
        self.server = xllamacpp.Server(params)

    def ask(self, prompt, count, *on_chunk):
        return self.server.handle_completions(dict(
            prompt=prompt, n_predict=count, ignore_eos=True, temperature=0.0, cache_prompt=False,
            stream=bool(on_chunk), timings_per_token=bool(on_chunk)), *on_chunk)

    def batch(self, prompts, output_lens):
        with ThreadPoolExecutor(len(prompts)) as pool:
            done = pool.map(self.ask, prompts, output_lens)
        return [[-1] * answer["usage"]["completion_tokens"] for answer in done]

    def stream(self, prompt, count, on_token):
        seen = 0
        def on_chunk(chunk):  # half a character waits for its other half: several tokens in one
            nonlocal seen
            made = chunk.get("timings", {}).get("predicted_n", seen)
            for _ in range(seen, made):
                on_token(-1)
            seen = max(seen, made)
        self.ask(prompt, count, on_chunk)

    def facts(self):
        return dict(versions=versions_of("xllamacpp"), format=self.format)

def gguf_format(job):
    """Which of a GGUF file's formats its reader gets: what the file's name says of itself."""
    if not job.get("gguf"):
        raise ValueError("this peer reads a GGUF file, and --model is none")
    return f"GGUF {Path(job['gguf']).stem.rpartition('.')[2]}"

ENTRANTS = {"nanoserve": Nanoserve, "transformers": Transformers,
            "transformers-continuous": ContinuousTransformers, "vllm": Vllm,
            "openvino": OpenVino, "llamacpp": LlamaCpp}


# ==================================================================================================
# 3  Running entrants
# ==================================================================================================
# Problem: two engines in one process share threads and memory, and one after the other they meet a
# machine that is warmer or busier.  Idea: a fresh process per entrant and repeat, in turns A B A B.
#
#     bench.py ──job.json──► PYTHON bench.py entrant NAME job.json ──last line of stdout──► result
#                            load · warm up · batch · stream · long prompt · peak memory
#
# Invariant: nanoserve and its peers go through the same function, run_entrant(), on the same job.
# Why: the time to load and to warm up is not part of a rate; load is reported by itself.

def run_entrant(args):
    """Inside the entrant's own process: do the job, print the result as the last line."""
    job = json.loads(Path(args["job"]).read_text())
    if args["name"] != "nanoserve":
        sys.path.pop(0)  # a peer must not take our files for packages of that name
    start = time.perf_counter()
    entrant = ENTRANTS[args["name"]](job)
    load_s = time.perf_counter() - start
    entrant.batch([prompt[:8] for prompt in job["prompts"][:4]], [4] * len(job["prompts"][:4]))
    start = time.perf_counter()
    outputs = entrant.batch(job["prompts"], job["output_lens"])
    batch_s = time.perf_counter() - start
    counts = [len(token_ids) for token_ids in outputs]
    if counts != job["output_lens"]:
        raise ValueError(f"the batch brought {sum(counts)} tokens, not {sum(job['output_lens'])}")
    stream_ids, token_times = time_stream(entrant, job["prompts"][0], job["stream_len"])
    _, (long_prompt_s,) = time_stream(entrant, job["long_prompt"], 1)
    print(json.dumps(dict(
        long_prompt_tokens=len(job["long_prompt"]), long_prompt_s=long_prompt_s,
        load_s=load_s, batch_s=batch_s, batch_tokens=sum(counts), stream_ids=stream_ids,
        token_times=token_times, peak_bytes=peak_resident_bytes(), **entrant.facts())))

def time_stream(entrant, prompt, count):
    """(token ids, seconds from the call to each token) of one request alone."""
    token_ids, times = [], []
    start = time.perf_counter()
    def on_token(token_id):
        times.append(time.perf_counter() - start)
        token_ids.append(token_id)
    entrant.stream(prompt, count, on_token)
    if len(times) != count:
        raise ValueError(f"the stream brought {len(times)} tokens, not {count}")
    return token_ids, times

def peak_resident_bytes():
    """Most memory this process ever held. Linux hands getrusage's maximum down from parent to
    child, so the kernel's mark of this address space (VmHWM, proc(5)) comes first."""
    mark = read_fields("/proc/self/status").get("VmHWM")
    if mark:
        return 1024 * int(mark.split()[0])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak

def start_entrant(name, python, job, folder):
    """Run one entrant in its own interpreter; returns its result. ValueError if it failed."""
    path = Path(folder, f"{name}.json")
    path.write_text(json.dumps(job))
    command = [python, str(Path(__file__).resolve()), "entrant", name, str(path)]
    env = {**os.environ, "OMP_WAIT_POLICY": "passive"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=env)
    except OSError as error:
        raise ValueError(f"{name}: {python} cannot be started: {error.strerror}") from None
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise ValueError(f"{name} failed in {python}: {reason}")
    return json.loads(done.stdout.splitlines()[-1])

def measure_in_turns(pythons, jobs, repeat, folder):
    """{name: [result of each repeat]}. pythons: {name: interpreter}, jobs: {name: job}"""
    results = {name: [] for name in pythons}
    for turn in range(repeat):
        for name, python in pythons.items():
            results[name].append(start_entrant(name, python, jobs[name], folder))
            shown = show_dict({k: f"{v:.1f}" for k, v in measures_of(results[name][-1]).items()})
            print(f"run {turn + 1}/{repeat}  {name:12s}  {shown}", file=sys.stderr, flush=True)
    return results

def parse_peers(specs):
    """{name: interpreter} of ["transformers=/path/to/python"]."""
    peers = {}
    for spec in specs:
        name, _, python = spec.partition("=")
        known = [entrant for entrant in ENTRANTS if entrant != "nanoserve"]
        if name not in known or not python:
            raise ValueError(f"--peer wants NAME=PYTHON, NAME in {', '.join(known)}; got {spec!r}")
        peers[name] = python
    return peers

def model_folder(checkpoint, dtype, parent):
    """Folder with config.json + model.safetensors, the form that peers read; written into `parent`
    unless the checkpoint is one. Weights rounded once, to dtype; no tokenizer, the work is ids.
    """
    from safetensors.torch import save_file
    if isinstance(checkpoint, nanoserve.SafetensorsFolder):
        return str(checkpoint.folder)
    target = Path(parent, "model")
    tensors, take, dtype = {}, checkpoint.take, DTYPES[dtype]
    def keep(name, shape, read=None):  # read would leave a quantized tensor packed
        tensors[name] = take(name, shape).to(getattr(torch, dtype)).contiguous()
        return tensors[name]
    checkpoint.take = keep  # building the model asks for every tensor, once, by its name
    config = nanoserve.read_model_config(checkpoint)
    nanoserve.Model(checkpoint, config, getattr(torch, dtype), torch.device("cpu"), None, 16)
    family = checkpoint.config["architectures"][0].removesuffix("ForCausalLM").lower()
    config = {"model_type": family, **checkpoint.config, "dtype": dtype}
    target.mkdir()
    (target / "config.json").write_text(json.dumps(config))
    save_file(tensors, str(target / "model.safetensors"), metadata={"format": "pt"})
    return str(target)


# ==================================================================================================
# 4  throughput
# ==================================================================================================
# Problem: "tokens per second" means two things: what the machine delivers to many, and what one
# person sees.  Idea: measure both, one after the other, and keep them apart.
#
#     batch    call ├── all requests at once ───────────────────┤   tok/s = output tokens / time
#     stream   call ├── TTFT ──┤ ITL ┤ ITL ┤ ITL ┤ ...              one request, alone
#     prompt   call ├── prefill ───────────┤                            prompt tokens / time
#
# TTFT starts at the call, with the model loaded and warm and nothing cached of the prompt.
#
# Invariant: only tokens somebody asked for count; padding and overrun are the engine's own affair.
# Why: the phases of the batch say whether the engine (schedule, pack, sample) or its model
#   (forward) limits it; they are read off the engine's own clock and sum to the wall time.

MEASURES = {  # name: (label, larger is better)
    "tok_s": ("batch tok/s", True),
    "stream_tok_s": ("one stream tok/s", True),
    "prefill_tok_s": ("long prompt tok/s", True),
    "ttft_ms": ("TTFT ms", False),
    "itl_p50_ms": ("ITL p50 ms", False),
    "itl_p99_ms": ("ITL p99 ms", False),
    "load_s": ("load s", False),
    "peak_mib": ("peak memory MiB", False),
}

def run_throughput(args):
    """Measure nanoserve and its peers on one workload; print everything, the JSON object last."""
    peers = parse_peers(args["peer"])
    options = {f.name: args[f.name] for f in nanoserve.fields(nanoserve.EngineConfig)
               if f.name in args and f.name not in NOT_OPTIONS}
    nanoserve.EngineConfig(model=args["model"], **options)  # a bad value ends here, not in a child
    checkpoint = nanoserve.open_checkpoint(args["model"])
    num_prompts, lens, repeat = (16, (16, 48), 1) if args["quick"] else (64, (32, 256), 3)
    prompts, output_lens = make_workload(args["num_prompts"] or num_prompts, args["seed"],
                                         checkpoint.config["vocab_size"], lens, lens)
    length = 256 if args["quick"] else 2000
    (long_prompt,), _ = make_workload(1, args["seed"], checkpoint.config["vocab_size"],
                                      (length, length))
    context = round(statistics.mean(map(len, prompts)) + statistics.mean(output_lens) / 2)
    job = dict(model=args["model"], dtype=args["dtype"], options=options, prompts=prompts,
               output_lens=output_lens, long_prompt=long_prompt, context=context,
               stream_len=32 if args["quick"] else 128)
    workload = dict(num_prompts=len(prompts), prompt_tokens=sum(map(len, prompts)),
                    output_tokens=sum(output_lens), stream_tokens=job["stream_len"],
                    long_prompt_tokens=len(long_prompt), seed=args["seed"])
    head = describe_run(model=checkpoint.name, dtype=args["dtype"], workload=workload)
    with tempfile.TemporaryDirectory(prefix="nanoserve-bench-") as folder:
        jobs = dict.fromkeys(["nanoserve", *peers], job)
        if peers:
            shared = model_folder(checkpoint, args["dtype"], folder)
            gguf = isinstance(checkpoint, nanoserve.GgufFile) and checkpoint.name
            jobs.update(dict.fromkeys(peers, {**job, "model": shared, "gguf": gguf}))
        pythons = {"nanoserve": sys.executable, **peers}
        results = measure_in_turns(pythons, jobs, args["repeat"] or repeat, folder)
    result = report_throughput(head, results)
    bench_plot.draw_bars(args["plot"], f"{workload['num_prompts']} requests at once, and one alone",
                         "output tokens per second", {
                             f"{name}, {label}": values[key] for key, label in
                             (("tok_s", "all"), ("stream_tok_s", "one"))
                             for name, values in result["values"].items()})
    publish(result, args["json"])

def measures_of(result):
    """{measure: value} of one run."""
    times = result["token_times"]
    gaps = [1000 * (b - a) for a, b in zip(times, times[1:])]
    return dict(
        tok_s=result["batch_tokens"] / result["batch_s"], stream_tok_s=len(times) / times[-1],
        prefill_tok_s=result["long_prompt_tokens"] / result["long_prompt_s"],
        ttft_ms=1000 * times[0], itl_p50_ms=percentile(gaps, 50), itl_p99_ms=percentile(gaps, 99),
        load_s=result["load_s"], peak_mib=result["peak_bytes"] / 2**20)

def percentile(values, p):
    """Nearest rank: the smallest value that at least p percent of the values do not exceed.

    >>> percentile([4, 1, 3, 2], 50), percentile([4, 1, 3, 2], 99), percentile([7], 50)
    (2, 4, 7)
    """
    return sorted(values)[math.ceil(p / 100 * len(values)) - 1]

def spread(values):
    """Median, and (smallest-largest) when there is more than one value.

    >>> spread([612.44, 598.1, 640.0]), spread([31.26])
    ('612 (598-640)', '31.3')
    """
    show = lambda x: f"{x:.0f}" if abs(x) >= 100 else f"{x:.3g}"
    middle = show(statistics.median(values))
    return middle if len(values) == 1 else f"{middle} ({show(min(values))}-{show(max(values))})"

def ratio_of(ours, theirs, larger_is_better):
    """How many times better our median is than theirs; below 1 is worse.

    >>> ratio_of([600], [150], True), ratio_of([20], [30], False)
    (4.0, 1.5)
    """
    a, b = statistics.median(ours), statistics.median(theirs)
    return a / b if larger_is_better else b / a

def report_throughput(head, results):
    """Print versions, table, phases, shares of the limit; return head extended by all of it."""
    import bench_limits  # which imports this file
    values = {name: {key: [measures_of(run)[key] for run in runs] for key in MEASURES}
              for name, runs in results.items()}
    ours, first = values["nanoserve"], results["nanoserve"][0]
    peers = [name for name in results if name != "nanoserve"]
    ratios = {name: {key: ratio_of(ours[key], values[name][key], larger_is_better)
                     for key, (_, larger_is_better) in MEASURES.items()} for name in peers}
    versions = {name: runs[0]["versions"] for name, runs in results.items()}
    for name in versions:
        print(f"{name:14s} {show_dict(versions[name])}")
    print("\n".join(" " * 15 + line for line in first["report"]))
    formats = {name: runs[0]["format"] for name, runs in results.items()}
    print_table(values, ratios, formats)
    same = {name: matching_prefix(first["stream_ids"], results[name][0]["stream_ids"])
            for name in peers if -1 not in results[name][0]["stream_ids"]}
    for name, count in same.items():
        print(f"one stream, first tokens as {name}: {count} of {len(first['stream_ids'])}")
    runs = sorted(results["nanoserve"], key=lambda run: run["batch_s"])
    middle = runs[len(runs) // 2]  # medians of single phases would not sum to any run's time
    shares = {name: phase_shares(phases) for name, phases in middle["phases"].items()}
    for name, share in shares.items():
        print(f"time of the {name}: "
              + "  ".join(f"{phase} {x:.1%}" for phase, x in share.items()))
    print()
    bench_limits.print_steps(middle["steps"])
    return dict(head, versions=versions, formats=formats, steps=middle["steps"],
                kv_blocks=first["kv_blocks"], block_size=first["block_size"], values=values,
                ratios=ratios, same_tokens=same,
                batch_seconds=middle["batch_s"], phase_seconds=middle["phases"],
                phase_shares=shares, stats=middle["stats"], load_at_end=os.getloadavg()[0])

def print_table(values, ratios, formats):
    """A row per measure, a column per entrant; peers with how many times better nanoserve is."""
    print("\n" + " " * 18 + "".join(f"{name:>32s}" for name in values))
    print(f"{'weights':18s}" + "".join(f"{formats[name]:>32s}" for name in values))
    for key, (label, _) in MEASURES.items():
        cells = [spread(values[name][key]) for name in values]
        cells = [f"{cell}  {ratios[name][key]:5.2f}x" if name in ratios else cell
                 for name, cell in zip(values, cells)]
        print(f"{label:18s}" + "".join(f"{cell:>32s}" for cell in cells))
    runs = len(values["nanoserve"]["tok_s"])
    print(f"measured; median (smallest-largest) of {runs} run(s); N x: nanoserve is N times "
          "better; TTFT starts at the call\n")

def matching_prefix(a, b):
    """Number of equal tokens before the first difference.

    >>> matching_prefix([1, 2, 3], [1, 2, 4]), matching_prefix([1], [1])
    (2, 1)
    """
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))

def phase_shares(phases):
    """Share of each phase, and of "bookkeeping": what an engine adds to its model's arithmetic."""
    wall = sum(phases.values())
    shares = {name: phases[name] / wall for name in sorted(phases, key=phases.get, reverse=True)}
    bookkeeping = sum(shares.get(name, 0.0) for name in ("schedule", "pack", "sample"))
    return {**shares, "bookkeeping": bookkeeping}


# ==================================================================================================
# 5  Command line
# ==================================================================================================
# A command is a row of COMMANDS and two functions of its module, by name: run_throughput(arguments)
# and add_throughput_options(parser). ValueError is what the person at the keyboard can mend.

SOURCES = ("measured", "computed", "quoted")

def publish(result, file=None):
    """Print result as one line of JSON, and append the line to file. ValueError for figures that do
    not say where they come from."""
    if result.get("source") not in SOURCES:
        raise ValueError(f"a result needs a source, one of {SOURCES}: {list(result)}")
    line = json.dumps(result)
    if file:
        with open(file, "a", encoding="utf-8") as out:
            out.write(line + "\n")
    print(line)

def positive(text):
    """An argparse type: an integer of at least 1."""
    if int(text) < 1:
        raise ValueError
    return int(text)

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
NOT_OPTIONS = ("model", "dtype", "seed")  # of EngineConfig: throughput has its own

def add_measure_options(parser, quick, repeat, model=True):
    """What measurements have in common; quick: what it leaves out, repeat: what, and how often."""
    add = parser.add_argument
    if model:
        add("--model", help=f"as nanoserve.py --model (default: {DEFAULT_MODEL})")
    add("--quick", action="store_true", help=f"{quick}, as a check")
    add("--repeat", type=positive, help=repeat)
    add("--json", metavar="FILE", help="append the JSON object to this file")
    add("--plot", type=bench_plot.picture, metavar="FILE", help="draw it: figure.svg, or .png")

def add_throughput_options(parser):
    add_measure_options(parser, "a small workload once", "runs of each entrant (default: 3)")
    add = parser.add_argument
    add("--dtype", choices=DTYPES, default="bf16", help="of all entrants (default: bf16)")
    add("--num-prompts", type=positive, help="requests in the batch (default: 64, quick: 16)")
    add("--seed", type=int, default=0, help="of the workload (default: 0)")
    add("--peer", action="append", default=[], metavar="NAME=PYTHON", help="also run this engine")
    engine = parser.add_argument_group("engine")
    nanoserve.add_options(engine, nanoserve.EngineConfig, skip=NOT_OPTIONS)

def add_entrant_options(parser):
    parser.add_argument("name", choices=ENTRANTS)
    parser.add_argument("job", help="JSON file")

COMMANDS = {  # name: (module, None for this one; words for --help)
    "throughput": (None, "many requests, then one stream"),
    "kernels": ("bench_kernels", "operators against what this machine can do; or compiled only"),
    "quant": ("bench_quant", "weight and KV formats: divergence from bf16 beside speed"),
    "spec": ("bench_spec", "drafts: acceptance, tokens per call, speed-up"),
    "latency": ("bench_serving", "open-loop arrivals: TTFT, ITL, TPOT, E2E, goodput"),
    "prefix": ("bench_serving", "prefix caching, on and off: prefix length x output length"),
    "chunk": ("bench_serving", "chunk size: gaps of the others, TTFT of a long prompt"),
    "switches": ("bench_serving", "every optimisation off in turn, and what that costs"),
    "streams": ("bench_server", "what the server costs: 64 streams beside the engine alone"),
    "lesson": ("lessons", "the articles' worked examples, run and compared"),
    "capacity": ("lessons", "KV cache of a config.json: per token, rank, request, pool"),
    "simulate": ("lessons", "rounds of the scheduler for id:arrival:prompt:output ..."),
    "slots": ("lessons", "where a position lies: table, block, offset, slot"),
    "entrant": (None, "one engine, one job file: used by throughput"),
}

def main(argv=None):
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="bench.py", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (module, summary) in COMMANDS.items():
        sub = commands.add_parser(name, help=summary, description=summary)
        if argv[:1] == [name]:  # the others stay short, and their modules unread
            home = vars(importlib.import_module(module)) if module else globals()
            home[f"add_{name}_options"](sub)
    args = vars(parser.parse_args(argv))
    try:
        home[f"run_{args['command']}"](args)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0

if __name__ == "__main__":
    sys.exit(main())
