"""Use an encoder of this package as the vision tower of LLaVA and train the model to name the colors of images."""

import torch
from transformers import LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

from hf_vit import HfViTConfig


IMAGE = 7  # placeholder token, replaced by the features of one patch
vision = HfViTConfig.from_preset("mnist", num_channels=3, patch_size=7)
text = LlamaConfig(vocab_size=8, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE, image_seq_length=16)
# To use a pretrained encoder: model.model.vision_tower = HfViTModel.from_pretrained(...)
model = LlavaForConditionalGeneration(config)
images = torch.eye(3)[:, :, None, None].expand(-1, -1, 28, 28)  # a red, a green and a blue image
colors = torch.tensor([[3], [4], [5]])
prompt = torch.full((3, vision.num_patches), IMAGE)
tokens = torch.cat((prompt, colors), dim=1)
labels = tokens.where(tokens != IMAGE, -100)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(50):
    model(pixel_values=images, input_ids=tokens, labels=labels).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
answers = model.eval().generate(pixel_values=images, input_ids=prompt, max_new_tokens=1)[:, -1:]
print(answers.equal(colors))
model.config.vision_config.save_pretrained("llava")  # saves the code of the encoder
model.save_pretrained("llava")
