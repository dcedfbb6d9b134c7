"""A process of llama-cpp-python's environment: what llama.cpp makes of files.

`python llama_cpp_run.py SPEC-AS-JSON`, a list of {"file", "ids", "to", "prompt", "tokens", "texts"}; logits
of `ids` go to the file `to` in fp32; one JSON line each: tokens of `texts`, and `tokens` greedy ones after
`prompt`.
"""

import json
import sys


def main() -> None:
    import llama_cpp

    for spec in json.loads(sys.argv[1]):
        model = llama_cpp.Llama(
            spec["file"],
            n_ctx=512,
            n_batch=256,
            n_threads=1,
            n_threads_batch=1,
            logits_all=True,
            verbose=False,
            type_k=llama_cpp.GGML_TYPE_F32,
            type_v=llama_cpp.GGML_TYPE_F32,
        )
        model.eval(spec["ids"])
        model.scores[: len(spec["ids"])].astype("float32").tofile(spec["to"])
        tokens = [model.tokenize(text.encode(), add_bos=True, special=True) for text in spec["texts"]]
        model.reset()
        greedy = []
        if spec["tokens"]:
            for token in model.generate(spec["prompt"], top_k=1, temp=0.0, repeat_penalty=1.0):
                greedy.append(int(token))
                if len(greedy) == spec["tokens"]:
                    break
        template = model.metadata.get("tokenizer.chat_template")
        print(json.dumps({"tokens": tokens, "greedy": greedy, "template": template}), flush=True)
        model.close()


if __name__ == "__main__":
    main()
