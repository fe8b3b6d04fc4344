{{/* Marks the volume as holding this model. */}}
{{- define "grpo.modelHash" -}}
{{ include "grpo.model" . | sha256sum | trunc 12 }}
{{- end }}

{{/* Jobs are immutable, so the name changes with the content. */}}
{{- define "grpo.modelJobName" -}}
{{ include "grpo.name" . }}-model-{{ include "grpo.modelPod" . | sha256sum | trunc 8 }}
{{- end }}

{{- define "grpo.modelPod" -}}
metadata:
  labels:
    {{- include "grpo.labels" (list . "model") | nindent 4 }}
    grpo/volumes: "true"
spec:
  restartPolicy: Never
  {{- include "grpo.podDefaults" (list . .Values.trainer "volumes") | nindent 2 }}
  containers:
    - name: model
      image: {{ include "grpo.image" (list . "trainer" .Values.model.image) }}
      {{- include "grpo.containerDefaults" . | nindent 6 }}
      command: [tini, -s, --, sh, -c]
      args:
        - |
          set -eu
          {{- if not .Values.model.name }}
          [ -e /models/tiny ] || python3 -m grpo_tiny_model --directory /models/tiny
          {{- end }}
          python3 -m grpo_trainer.model.download {{ include "grpo.model" . | squote }} --save-path /checkpoints
          mkdir -p /models/.ready
          touch /models/.ready/{{ include "grpo.modelHash" . }}
      env:
        - {name: OMP_NUM_THREADS, value: {{ .Values.cpuThreads | quote }}}
        {{- if .Values.model.hubToken.existingSecret }}
        - {name: HF_TOKEN_PATH, value: /run/secrets/hf_token}
        {{- end }}
      resources: {requests: {cpu: 100m, memory: 1Gi}}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        - {name: models, mountPath: /models}
        - {name: checkpoints, mountPath: /checkpoints}
        {{- if .Values.model.hubToken.existingSecret }}
        - {name: hub-token, mountPath: /run/secrets, readOnly: true}
        {{- end }}
  volumes:
    - {name: tmp, emptyDir: {}}
    - name: models
      persistentVolumeClaim: {claimName: {{ include "grpo.modelsClaim" . }}}
    - name: checkpoints
      persistentVolumeClaim: {claimName: {{ include "grpo.checkpointsClaim" . }}}
    {{- with .Values.model.hubToken.existingSecret }}
    - name: hub-token
      secret: {secretName: {{ . }}, items: [{key: {{ $.Values.model.hubToken.key }}, path: hf_token}]}
    {{- end }}
{{- end }}
