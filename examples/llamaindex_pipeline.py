"""Questions over texts of one's own by LlamaIndex: Quarrel embeds them, finds the nearest and answers, in this process."""

from __future__ import annotations

import sys
from typing import Any

import quarrel

try:
    from llama_index.core import Document, PromptTemplate, Settings, VectorStoreIndex
    from llama_index.core.embeddings import BaseEmbedding
    from llama_index.core.llms import CompletionResponse, CustomLLM, LLMMetadata
except ImportError:
    sys.exit("needs LlamaIndex: pip install llama-index-core")

llm = quarrel.load(sys.argv[1] if len(sys.argv) > 1 else "demo")


class Embeddings(BaseEmbedding):
    def _get_text_embedding(self, text: str) -> list[float]:
        return llm.embed([text], pooling="mean").vectors[0].tolist()

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)


class Model(CustomLLM):
    @property
    def metadata(self) -> LLMMetadata:
        return LLMMetadata(context_window=512, num_output=24, model_name="quarrel")

    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        return CompletionResponse(text=llm.generate(prompt, max_tokens=24, seed=1).text)

    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> Any:
        text = ""
        for chunk in llm.stream(prompt, max_tokens=24, seed=1):
            text += chunk.text
            yield CompletionResponse(text=text, delta=chunk.text)


Settings.llm, Settings.embed_model = Model(), Embeddings()
index = VectorStoreIndex.from_documents(
    [Document(text="The mill stands by the river."), Document(text="Bread is baked at dawn.")]
)
# A short template and a plain answer: the bundled model's context is only 512 tokens.
template = PromptTemplate("{context_str}\n{query_str}\n")
engine = index.as_query_engine(similarity_top_k=1, response_mode="simple_summarize", text_qa_template=template)
print(engine.query("Where is the mill?"))
llm.close()
