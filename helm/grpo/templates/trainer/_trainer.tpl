{{/* Name of the pod that has rank 0. */}}
{{- define "grpo.trainerHost" -}}
{{- if gt (int .Values.trainer.nodes) 1 }}$(JOB_NAME)-0.{{ end }}{{ include "grpo.name" . }}-trainer
{{- end }}

{{- define "grpo.trainerEnv" -}}
{{- $v := .Values }}
{{- $id := include "grpo.runId" . }}
{{- $env := dict
  "OMP_NUM_THREADS" $v.cpuThreads
  "HF_HUB_OFFLINE" "1"
  "RUN_ID" $id
  "GRPO_MODEL" (include "grpo.model" .)
  "GRPO_RUN_API_URL" (printf "http://%s-run-api:8000" (include "grpo.name" .))
  "GRPO_INFERENCE_URL" (printf "http://%s-vllm-server:9001" (include "grpo.name" .))
  "GRPO_STEPS" $v.run.steps
  "GRPO_BATCH_SIZE" $v.run.batchSize
  "GRPO_GRADIENT_ACCUMULATION_STEPS" $v.run.gradientAccumulationSteps
  "GRPO_SEQ_LEN" $v.run.seqLen
  "GRPO_WARMUP_STEPS" $v.run.warmupSteps
  "GRPO_OBJECTIVE" $v.run.objective
  "GRPO_DTYPE" (include "grpo.dtype" .)
  "GRPO_SEED" $v.run.seed
  "GRPO_CHECKPOINT_INTERVAL" $v.run.checkpointInterval
  "GRPO_RESUME" "auto"
  "GRPO_BENCHMARK" true
  "GRPO_LR" ($v.run.lr | default (eq (include "grpo.lora" .) "true" | ternary "2e-3" "3e-4"))
  "GRPO_METRICS_HOST" "::"
  "GRPO_METRICS_PORT" 9101
  "GRPO_METRICS_FILE" (printf "/checkpoints/%s/metrics.jsonl" $id)
  "GRPO_RANKS" $v.trainer.ranks
  "GRPO_USE_WANDB" $v.wandb.enabled
  "GRPO_WANDB_PROJECT" $v.wandb.project
  "GRPO_WANDB_KEY_FILE" "/run/secrets/wandb_api_key"
  "WANDB_DIR" "/checkpoints"
  "WANDB_MODE" $v.wandb.mode
}}
{{- /* A node may need minutes to pull images, or to move a pod and its volumes. */}}
{{- range list "SERVICE" "SERVER_RETURN" "ENVIRONMENT_RETURN" "BATCH" }}
{{- $_ := set $env (printf "GRPO_%s_DEADLINE_S" .) 1800 }}
{{- end }}
{{- /* Ranks wait while rank 0 waits for a batch and for a server. */}}
{{- $_ := set $env "GRPO_RANK_DEADLINE_S" 7200 }}
{{- if not $v.wandb.existingSecret }}
{{- $_ := unset $env "GRPO_WANDB_KEY_FILE" }}
{{- end }}
{{- if include "grpo.lora" . }}
{{- $env = merge $env (dict
  "GRPO_LORA_R" $v.run.lora.r
  "GRPO_LORA_ALPHA" $v.run.lora.alpha
  "GRPO_LORA_DROPOUT" $v.run.lora.dropout
  "GRPO_LORA_TARGET_MODULES" (join "," $v.run.lora.targetModules)
) }}
{{- end }}
{{- if eq $v.mode "lora_only" }}
{{- $_ := set $env "GRPO_ADAPTER_SYNC_INTERVAL" $v.run.adapterSyncInterval }}
{{- else if ne $v.mode "shared_vllm" }}
{{- $_ := set $env "GRPO_VLLM_RESTART_INTERVAL" ($v.run.restartInterval | default (eq $v.mode "none" | ternary 1 10)) }}
{{- end }}
{{- if eq (include "grpo.layout" .) "single" }}
{{- $env = merge $env (dict
  "GRPO_RUN_MODE" $v.mode
  "GRPO_RUN_MODEL" (include "grpo.model" .)
  "GRPO_RUN_ATROPOS_URL" $env.GRPO_RUN_API_URL
  "GRPO_RUN_HOST" "::"
  "GRPO_RUN_SAVE_PATH" (printf "/checkpoints/%s" $id)
  "GRPO_RUN_LOG_DIR" (printf "/checkpoints/%s/logs" $id)
  "GRPO_VLLM_ALLOWED_HOSTS" (printf "%s-vllm-server.%s" (include "grpo.name" .) .Release.Namespace)
  "GRPO_VLLM_CONTROL_PORT" 9002
  "GRPO_VLLM_CONTROL_URL" "http://127.0.0.1:9002"
  "GRPO_VLLM_REDIS_DEADLINE_S" 1800
) }}
{{- else }}
{{- $env = merge $env (dict
  "GRPO_MODE" $v.mode
  "GRPO_SAVE_PATH" (printf "/checkpoints/%s" $id)
) }}
{{- if ne $v.mode "shared_vllm" }}
{{- /* The trainer serves new weights here. It starts with the first server; others may join and leave. */}}
{{- $env = merge $env (dict
  "NUM_INFERENCE_NODES" 1
  "MASTER_ADDR" (include "grpo.trainerHost" .)
  "MASTER_PORT" 26756
) }}
{{- if gt (int $v.trainer.nodes) 1 }}
{{- $env = merge $env (dict
  "GRPO_NODES" $v.trainer.nodes
  "GRPO_RENDEZVOUS" (printf "%s:29400" (include "grpo.trainerHost" .))
) }}
{{- end }}
{{- else }}
{{- $env = mergeOverwrite $env (dict
  "GRPO_INFERENCE_URL" "http://127.0.0.1:9001"
  "GRPO_WEIGHTS_SOCKET" "/share/weights/weights.sock"
  "GRPO_VLLM_CONTROL_URL" "http://127.0.0.1:9002"
) }}
{{- end }}
{{- end }}
{{- include "grpo.env" (list . $env "redis" "RUN_API_TOKEN" "VLLM_API_KEY") }}
{{- end }}

{{- define "grpo.trainerPod" -}}
{{- $layout := include "grpo.layout" . }}
{{- $gpu := eq .Values.device "gpu" }}
{{- $image := include "grpo.image" (list . (eq $layout "single" | ternary "single" "trainer") .Values.trainer.image) -}}
metadata:
  labels:
    {{- include "grpo.labels" (list . "trainer") | nindent 4 }}
    grpo/volumes: "true"
    {{- if ne $layout "apart" }}
    grpo/inference: "true"
    {{- end }}
  {{- with include "grpo.scraped" (list . 9101) }}
  {{- . | nindent 2 }}
  {{- end }}
spec:
  restartPolicy: Never
  {{- include "grpo.podDefaults" (list . .Values.trainer "volumes" "gpu") | nindent 2 }}
  {{- if gt (int .Values.trainer.nodes) 1 }}
  subdomain: {{ include "grpo.name" . }}-trainer
  {{- end }}
  terminationGracePeriodSeconds: {{ .Values.trainer.terminationGracePeriodSeconds }}
  {{- if eq $layout "pair" }}
  # CUDA's handles are valid only within one process namespace.
  shareProcessNamespace: true
  resourceClaims:
    - {name: gpu, resourceClaimTemplateName: {{ include "grpo.claimTemplate" . }}}
  {{- end }}
  initContainers:
    - {{ include "grpo.awaitModel" (list . $image) | indent 6 | trim }}
    {{- if eq $layout "pair" }}
    - {{ include "grpo.serverContainer" (list . "exec") | indent 6 | trim }}
      # A sidecar: it runs beside the trainer, and ends after it.
      restartPolicy: Always
      {{- include "grpo.resources" (list . .Values.vllmServer.resources 0 true) | nindent 6 }}
    {{- end }}
  containers:
    - name: trainer
      image: {{ $image }}
      {{- include "grpo.containerDefaults" . | nindent 6 }}
      command:
        - tini
        - -s
        - --
        - bash
        - /usr/local/bin/restarting.sh
        - trainer
        - {{ include "grpo.text" .Values.trainer.restarts | quote }}
        - /checkpoints
        - /share/given-up
        - {{ eq $layout "single" | ternary "grpo-run" "grpo" }}
      {{- if or (eq $layout "single") .Values.trainer.extraArgs }}
      args:
        {{- if eq $layout "single" }}
        - {{ printf "--server-flags=%s" (include "grpo.serverFlags" .) | quote }}
        {{- end }}
        {{- range .Values.trainer.extraArgs }}
        - {{ include "grpo.text" . | quote }}
        {{- end }}
      {{- end }}
      env:
        {{- if gt (int .Values.trainer.nodes) 1 }}
        - {name: JOB_NAME, valueFrom: {fieldRef: {fieldPath: "metadata.labels['job-name']"}}}
        {{- end }}
        {{- include "grpo.trainerEnv" . | trim | nindent 8 }}
      ports:
        - {name: metrics, containerPort: 9101}
        {{- if eq $layout "apart" }}
        - {name: weights, containerPort: 26756}
        {{- else if eq $layout "single" }}
        - {name: http, containerPort: 9001}
        {{- end }}
      {{- if eq $layout "single" }}
      # No liveness probe: grpo-run ends when its server fails.
      {{- include "grpo.serverReadiness" "exec" | nindent 6 }}
      {{- end }}
      {{- include "grpo.resources" (list . (include "grpo.trainerResources" . | fromYaml) (and $gpu (ne $layout "pair") | ternary .Values.trainer.ranks 0) (eq $layout "pair")) | nindent 6 }}
      volumeMounts:
        {{- include "grpo.computeMounts" . | nindent 8 }}
        {{- if .Values.wandb.existingSecret }}
        - {name: wandb, mountPath: /run/secrets, readOnly: true}
        {{- end }}
  volumes: {{- include "grpo.computeVolumes" . | nindent 4 }}
{{- end }}

{{/* Those of one rank, times the number of ranks. */}}
{{- define "grpo.trainerResources" -}}
{{- $resources := deepCopy .Values.trainer.resources }}
{{- range $of := list "requests" "limits" }}
{{- range $name, $quantity := get $resources $of | default dict }}
{{- $unit := regexFind "[A-Za-z]*$" (toString $quantity) }}
{{- $number := trimSuffix $unit (toString $quantity) | float64 | mulf $.Values.trainer.ranks }}
{{- $_ := set (get $resources $of) $name (printf "%s%s" (include "grpo.text" $number) $unit) }}
{{- end }}
{{- end }}
{{- toYaml $resources }}
{{- end }}

{{/* A ResourceClaimTemplate is immutable, too. */}}
{{- define "grpo.claimTemplate" -}}
{{ include "grpo.name" . }}-gpu-{{ .Values.gpu.deviceClassName | sha256sum | trunc 8 }}
{{- end }}

{{/* restarting.sh restarts a failing trainer, so a trainer that ends with an error has failed for good. 137 and 143:
     the whole container was killed or stopped. */}}
{{- define "grpo.trainerJobSpec" -}}
backoffLimit: {{ .Values.trainer.backoffLimit }}
{{- if gt (int .Values.trainer.nodes) 1 }}
completionMode: Indexed
completions: {{ .Values.trainer.nodes }}
parallelism: {{ .Values.trainer.nodes }}
{{- end }}
podFailurePolicy:
  rules:
    - action: Ignore
      onPodConditions: [{type: DisruptionTarget, status: "True"}]
    - action: Ignore
      onExitCodes: {containerName: trainer, operator: In, values: [143]}
    - action: FailJob
      onExitCodes: {containerName: trainer, operator: NotIn, values: [137, 143]}
template: {{- include "grpo.trainerPod" . | nindent 2 }}
{{- end }}

{{/* Jobs are immutable, so the name changes with the content. `helm upgrade` then starts a new trainer, which goes on
     from the newest checkpoint. */}}
{{- define "grpo.trainerName" -}}
{{ include "grpo.name" . }}-trainer-{{ include "grpo.trainerJobSpec" . | sha256sum | trunc 8 }}
{{- end }}
